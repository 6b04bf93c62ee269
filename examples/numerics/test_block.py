"""A model's numerics as a test: errors against float64 and bf16, and a golden file of plan and statistics.

pytest examples/numerics                      compares with test_block/*.json
pytest examples/numerics --numerics-update    accepts a change
fxprec ci > .github/workflows/numerics.yml    runs it on every push; numerics.yml here is what it prints
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """(batch, 32) to the same shape: a gated feed-forward with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(32), nn.Linear(32, 64)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Block(), (torch.randn(16, 32),)


def test_block_in_fp8(numerics) -> None:
    numerics.check(make, options={"recipe": "fp8"})
