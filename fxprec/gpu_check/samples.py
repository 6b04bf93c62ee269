"""Inputs that several items use: hard numbers, rows of the scale table, a small transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxprec.numerics.formats import parse
from fxprec.numerics.rows import format_row


def hard_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return float32 with random bit patterns among ordinary numbers of many sizes, with infinities, NaN and zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32).view(torch.float32)
    usual = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-12, 12, shape, generator=g)
    x = torch.where(torch.rand(shape, generator=g) < 0.7, usual, x)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45])
    x.view(-1)[: len(special)] = special[: x.numel()]
    return x


def table_of(formats: Sequence[str], device: torch.device, *, exponent: int = 0, measure: bool = False) -> Tensor:
    """Return a scale table, int32, with one row per format, all with the same scale exponent."""
    rows = [[exponent, *format_row(parse(name))[1:], 0, int(measure)] for name in formats]
    return torch.tensor(rows, dtype=torch.int32, device=device)


class Block(nn.Module):
    """Maps (batch, tokens, width) to the same: norm, attention, norm, GELU, residual adds; four linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result for ``x``."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return result


def transformer(device: torch.device, *, width: int, heads: int, layers: int = 2) -> nn.Module:
    """Return transformer blocks with the same weights on every device."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, heads) for _ in range(layers))).to(device)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's gradients and clear them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
