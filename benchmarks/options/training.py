"""Small networks with what options meet, and a training loop with the habits that a case names."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec
from benchmarks.graphs.values import Noise
from benchmarks.options.cases import CHOICES, Case, setting

WIDTH, RATE = 32, 1e-2  # a multiple of the blocks of mxfp8 and nvfp4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "torch": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (fxprec.optim.SGD, {"momentum": 0.5, "update": "nearest"}),
    "sgd sums": (fxprec.optim.SGD, {"gradients": "bf16", "update": "nearest"}),
    **{f"adamw {states}": (fxprec.optim.AdamW, {"eps": 1.0, "states": states, "update": "nearest"}) for states in ("float32", "8bit", "auto")},
}  # fmt: skip
"""With AdamW's usual eps a gradient near 0 moves its weight as far as a large one does, by the sign of its error."""


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


def mlp() -> nn.Module:
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(64, WIDTH))


NETWORKS = {"mlp": mlp, "residual": Residual, "block": Block, "experts": Experts, "checkpointed": Checkpointed,
            "broken": lambda: Checkpointed(breaks=True), "masked": Masked, "down": Down}  # fmt: skip
TOKENS, IMAGES = ("block", "masked"), ("residual", "down")


class Training:
    """A model, its optimizer and, with options, the backend that compiles it."""

    def __init__(self, case: Case, options: dict[str, Any] | None = None, noise: Noise | None = None) -> None:
        self.case, self.noise = (
            SimpleNamespace(**{name: setting(case, name) for name in CHOICES}),
            noise or nullcontext(),
        )
        self.is_exact, self.promoted = self.case.weights == "float32", 0
        torch.manual_seed(0)
        self.model = NETWORKS[self.case.network]().to(getattr(torch, self.case.weights))
        for parameter in list(self.model.parameters())[: 2 * self.case.frozen]:
            parameter.requires_grad_(False)
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        kind, given = OPTIMIZERS[self.case.optimizer]
        self.is_clipped = self.case.clip == "torch" or (self.case.clip is not None and kind is torch.optim.SGD)
        if self.case.clip is not None and not self.is_clipped:
            given = {**given, "max_norm": 0.5, "norm": self.case.clip}
        self.optimizer = kind([p for p in self.model.parameters() if p.requires_grad], lr=RATE, **given)
        self.called: Any = self.model
        self.backend: Any = None
        self.is_stepped = options is not None and self.case.in_backward
        if options is not None:
            torch._dynamo.reset()
            own = {"optimizer": self.optimizer if self.is_stepped else None, "step_budget": options.get("step_budget")}
            config = fxprec.Config(**{name: value for name, value in options.items() if name != "step_budget"})
            self.backend = fxprec.Backend(config, **own)
            dynamic = None if self.case.dynamic == "mark" else self.case.dynamic
            self.called = torch.compile(self.model, backend=self.backend, dynamic=dynamic)

    def run(self, first: int, last: int) -> dict[str, Tensor]:
        """Take steps; return losses, gradients, how far parameters have moved, and buffers, float64, by name."""
        found: dict[str, Tensor] = {}
        for step in range(first, last):
            found.update((f"step {step}: {name}", x.detach().double().clone()) for name, x in self._step(step))
        return found

    def _step(self, step: int) -> Iterator[tuple[str, Tensor]]:
        case = self.case
        if step == 3 and case.reset:
            torch.compiler.reset()
        if case.evaluate is not None and (step > 0) == (case.evaluate != "first") and step < 2:
            yield "evaluation", self._evaluation(step)
        parts = self._batch(step, case.sizes[step % len(case.sizes)]).chunk(case.parts)
        for i, part in enumerate(parts):
            if case.dynamic == "mark":
                torch._dynamo.mark_dynamic(part, 0)
            with self.noise:
                yield f"loss {i}", self._backward(part, step, len(parts))
        if not self.is_stepped:  # reading a gradient that backward has used is an error
            grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            torch._foreach_div_(list(grads.values()), case.loss_scale)
            if self.is_clipped:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            yield from ((f"gradient of {name}", grad) for name, grad in grads.items())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.backend is not None and case.save:
            self.backend.state_dict()
        if self.is_exact:
            yield from ((f"move of {name}", p - self.start[name]) for name, p in self.model.named_parameters())
            yield from self.model.named_buffers()

    def _batch(self, seed: int, rows: int) -> Tensor:
        pick = torch.Generator().manual_seed(100 + seed)
        if self.case.network in TOKENS:
            return torch.randint(0, WIDTH, (rows, 12), generator=pick)
        shape = (rows, 3, 8, 8) if self.case.network in IMAGES else (rows, WIDTH)
        return torch.randn(shape, generator=pick).to(getattr(torch, self.case.weights))

    def _loss(self, inputs: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            outputs = self.called(inputs)
        if isinstance(outputs, tuple):
            outputs = torch.cat([each.float().flatten() for each in outputs])
        target = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed))
        return F.mse_loss(outputs.float(), target), outputs

    def _backward(self, inputs: Tensor, seed: int, parts: int) -> Tensor:
        loss, outputs = self._loss(inputs, seed)
        scale = (1.0 if self.is_stepped else self.case.loss_scale) / parts
        (loss * scale).backward(retain_graph=self.case.retain)
        if self.case.retain:
            (outputs.float().square().mean() * 0.1 * scale).backward()
        return loss

    def _evaluation(self, step: int) -> Tensor:
        self.model.eval()
        modes = {"inference": torch.inference_mode, "with gradients": torch.enable_grad}
        with self.noise, modes.get(self.case.evaluate, torch.no_grad)():
            loss, _ = self._loss(self._batch(50 + step, 32), step)
        self.model.train()
        return loss

    def state(self) -> bytes:
        """Return model, optimizer and backend as a checkpoint file."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.model, self.optimizer, self.backend)], file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        """Load a result of `state`."""
        saved = torch.load(io.BytesIO(state), weights_only=True)
        for part, one in zip((self.model, self.optimizer, self.backend), saved, strict=True):
            part.load_state_dict(one)
