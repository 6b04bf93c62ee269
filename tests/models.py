"""Small models that several tests train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Apply(nn.Module):
    """A function as a layer, to stand between others in a `nn.Sequential`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class Parts(nn.Module):
    """Named layers, parameters and buffers, and the function that calls them: `Parts(lambda m, x: m.up(x), up=...)`."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any, *others: Any) -> Any:
        return self.call(self, x, *others)


class Residual(nn.Sequential):
    """The sum of the input and of what the layers make of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Checkpointed(nn.Module):
    """Layers that backward computes again."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layers, x, use_reentrant=False)


class SelfAttention(nn.Module):
    """(batch, tokens, width) to (batch, tokens, out): one layer makes queries, keys and values of all heads."""

    def __init__(self, width: int, inner: int, out: int, *, heads: int = 2, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * inner), nn.Linear(inner, out)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class TanhLayer(nn.Module):
    """(batch, 8) to (batch, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class FeedForward(nn.Module):
    """(..., width) to the same: a residual sum around two layers with a GELU between, behind a norm or not."""

    def __init__(self, width: int, hidden: int, *, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))
