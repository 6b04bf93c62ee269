"""Small networks with what options meet, and what a user does to a network before training it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 32  # a multiple of the blocks of mxfp8 and nvfp4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.norm, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.relu(x + self.second(self.conv(x))).mean((2, 3)))


class Block(nn.Module):
    """A transformer block with dropout, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.second = nn.Embedding(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out, self.up, self.down = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 1, 1, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1, self.training)
        return F.linear(x, self.embed.weight)


class Masked(nn.Module):
    """Attention that leaves out padding, with two heads, a dropout before them, and a logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.words, self.whole = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, is_word = self.embed(tokens), (tokens > 3) | (tokens == tokens[:, :1])
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=is_word[:, None, None, :])
        x = F.dropout(x + read.transpose(1, 2).flatten(2), 0.1, self.training)
        return self.words(x), F.log_softmax(self.whole(torch.log1p(x.square()).mean(1)), -1)


class Down(nn.Module):
    """A level of a U-Net: a pooling, an upsampling, and what was before the pooling beside it; a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.last = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(16, 4, 1),
        )
        self.norm, self.second = nn.BatchNorm2d(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norm(self.stem(x)), 0.1)
        y = F.silu(self.second(self.inner(F.max_pool2d(x, 2))))
        return self.last(torch.cat([x, F.interpolate(y, scale_factor=2.0, mode="nearest")], 1))


class Experts(nn.Module):
    """Two SwiGLU experts, mixed by a softmax, between two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gates, self.ups, self.downs = (nn.Parameter(0.3 * torch.randn(2, WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(F.rms_norm(x, (WIDTH,)))
        twice = x.expand(2, -1, -1)
        each = torch.bmm(F.silu(torch.bmm(twice, self.gates)) * torch.bmm(twice, self.ups), self.downs)
        return self.shared(torch.einsum("ne,enw->nw", self.router(x).softmax(-1), each) + x)


class Tripled(torch.autograd.Function):
    """tanh, with a gradient three times its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 3 * g * (1 - y * y)


class Checkpointed(nn.Module):
    """An autograd function before layers that are checkpointed, or that a branch on data, a graph break, stands before."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks, self.first, self.last = breaks, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = Tripled.apply(self.first(x))
        if self.breaks and x.square().sum() >= 0:
            x = x + 1
        return self.last(x + (self.body(x) if self.breaks else checkpoint(self.body, x, use_reentrant=False)))


class Teacher(nn.Module):
    """A network that predicts what an average of its own weights gives: forward updates the average, and rows of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(WIDTH, WIDTH, padding_idx=0), nn.Linear(WIDTH, WIDTH)
        self.predict = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("average", self.encoder.weight.detach().clone())

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        y = F.gelu(self.encoder(x))
        with torch.no_grad():
            if self.training:
                self.average.lerp_(self.encoder.weight, 0.25)
            wanted = F.gelu(F.linear(x, self.average))
        return self.predict(y), y - wanted


def mlp() -> nn.Module:
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(64, WIDTH))


NETWORKS = {"mlp": mlp, "residual": Residual, "block": Block, "experts": Experts, "checkpointed": Checkpointed,
            "broken": lambda: Checkpointed(breaks=True), "masked": Masked, "down": Down, "teacher": Teacher}  # fmt: skip
TOKENS, IMAGES = ("block", "masked", "teacher"), ("residual", "down")
LENGTH = 12  # of a sequence


def shapes(network: str, rows: int) -> list[tuple[int, ...]]:
    """Return the shapes of a network's results."""
    words = (rows, LENGTH, WIDTH)
    several = {"masked": [words, (rows, 4)], "teacher": [words, words], "block": [words]}
    return several.get(network, [{"residual": (rows, 4), "down": (rows, 4, 8, 8)}.get(network, (rows, WIDTH))])


def made(case: SimpleNamespace) -> nn.Module:
    """Return the network of a case, as it is before training."""
    model = NETWORKS[case.network]().to(getattr(torch, case.weights))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if case.parametrized is not None:
        getattr(parametrizations, case.parametrized)(layers[0])
    if case.partly:
        _hold_narrow(layers[-1])
    if case.channels_last:
        model.to(memory_format=torch.channels_last)
    parameters = list(model.parameters())
    for parameter in parameters[: 2 * bool(case.frozen)]:
        parameter.requires_grad_(False)
    _hook(case.hooks, layers[1], [p for p in parameters if p.requires_grad])
    return model


def _hold_narrow(layer: nn.Module) -> None:
    """Hold a layer in bfloat16; what stands around it keeps its dtype."""
    dtype = next(layer.parameters()).dtype
    layer.to(torch.bfloat16)
    layer.register_forward_pre_hook(lambda _, args: args[0].bfloat16())
    layer.register_forward_hook(lambda *called: called[-1].to(dtype))


def _hook(kind: str | None, layer: nn.Module, parameters: list[nn.Parameter]) -> None:
    def doubled(*called: Any) -> Any:
        (gradient,) = called[1]
        return (None if gradient is None else 2 * gradient,)

    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    if kind == "gradient":
        parameters[-1].register_hook(lambda gradient: 2 * gradient)
    elif kind == "accumulated":
        parameters[0].register_post_accumulate_grad_hook(double)
    elif kind == "module":
        layer.register_full_backward_hook(doubled)
    elif kind == "output":
        layer.register_forward_hook(lambda *called: 0.5 * called[-1])
