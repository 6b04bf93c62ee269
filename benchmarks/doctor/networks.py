"""Six small networks of different make, each with a batch and a loss. Modules worth a fault are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, TOKENS, BATCH = 64, 48, 24, 8


class Attention(nn.Module):
    """(batch, tokens, width); ``fused``: torch's attention, else softmax written out."""

    def __init__(self, width: int, heads: int = 4, *, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = torch.softmax(q @ k.mT * (d // self.heads) ** -0.5, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, *, fused: bool = True) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, fused=fused)
        self.norm2, self.feed = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Language(nn.Module):
    """A decoder of a few blocks over tokens."""

    def __init__(self, layers: int = 2, width: int = WIDTH, *, fused: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width, fused=fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Hidden(nn.Linear):
    """A linear layer and SiLU. What the layer computes is stored, and SiLU's result is recomputed from it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class Plain(nn.Module):
    """A multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Hidden(32, 96), Hidden(96, 96), Hidden(96, 96)
        self.last = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.second(self.first(x))))


class Convolutions(nn.Module):
    """Batch norm, ReLU and a residual connection, over (batch, 3, 16, 16)."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 24, 3, padding=1), norm(24)
        self.conv1, self.norm1 = nn.Conv2d(24, 24, 3, padding=1), norm(24)
        self.conv2, self.norm2 = nn.Conv2d(24, 24, 3, padding=1), norm(24)
        self.last = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm0(self.stem(x)))
        x = x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return self.last(torch.relu(x).mean((2, 3)))


class Mixer(nn.Module):
    """Tokens and channels mixed by perceptrons, (batch, tokens, width), with a softmax gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(WIDTH), nn.Linear(TOKENS, TOKENS)
        self.norm2, self.channels = nn.LayerNorm(WIDTH), FeedForward(WIDTH)
        self.gate, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        x = x + self.channels(self.norm2(x))
        return self.last((x * torch.softmax(self.gate(x), -1)).mean(1))


@dataclass(frozen=True)
class Network:
    """How a network is made, and where faults go."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    """Input and target."""
    loud: tuple[str, ...]
    """Modules whose input may be scaled, and the result back: each stores what a layer within it computes."""
    loud_weights: tuple[str, ...]
    """Layers whose weights may be scaled: a norm behind them takes it back."""
    softmax: Mapping[str, str]
    """Linear before a softmax, and the module that the softmax lies in."""

    def make(self, seed: int = 0) -> tuple[nn.Module, Tensor, Callable[[Any], Tensor]]:
        """Return model, input, loss."""
        torch.manual_seed(seed)
        model = self.build()
        x, target = self.batch()
        return model, x, lambda y: F.cross_entropy(y.flatten(0, -2).float(), target.flatten())

    def trained(self, steps: int, seed: int = 0) -> tuple[nn.Module, Tensor, Callable[[Any], Tensor]]:
        """Return them after some steps of Adam, each on a batch of its own."""
        model, x, loss = self.make(seed)
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        for step in range(steps):
            torch.manual_seed(seed + step)
            optimizer.zero_grad()
            _on(*self.batch())(model).backward()
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return model, x, loss


def _on(x: Tensor, target: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: F.cross_entropy(model(x).flatten(0, -2), target.flatten())


def _text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS))
    return tokens, tokens.roll(-1, 1)


def _of(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(shape), torch.randint(0, 10, (shape[0],)))


NETWORKS: Mapping[str, Network] = {
    "language": Network(
        Language, _text, ("layers.0.feed", "layers.1.attention"), (), {"layers.0.attention.qkv": "layers.0.attention"}
    ),
    "softmax": Network(
        lambda: Language(fused=False),
        _text,
        ("layers.1.feed", "layers.0.feed"),
        (),
        {"layers.1.attention.qkv": "layers.1.attention", "layers.0.attention.qkv": "layers.0.attention"},
    ),
    "plain": Network(Plain, _of(64, 32), ("second", "third"), (), {}),
    "batch norm": Network(Convolutions, _of(BATCH, 3, 16, 16), (), ("stem", "conv1"), {}),
    "group norm": Network(
        lambda: Convolutions(lambda n: nn.GroupNorm(4, n)), _of(BATCH, 3, 16, 16), (), ("stem", "conv2"), {}
    ),
    "mixer": Network(Mixer, _of(BATCH, TOKENS, WIDTH), ("channels",), (), {"gate": ""}),
}
