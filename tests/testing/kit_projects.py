"""Projects for pytester: what a user writes."""

from __future__ import annotations

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))

inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
"""
THREE_LINES = """
from model import Block, inputs

def test_block(numerics):
    numerics.check(Block, inputs, options={"recipe": "fp8", "low_ratio": 0.4})
"""
