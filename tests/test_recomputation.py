"""Dropout and checkpoints: what is recomputed in backward is what forward computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import FINE_TOLERANCE, eager_backend, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Masked(nn.Module):
    """Returns the mask too, so that a copy without random numbers can be given it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def part(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.a(x))
        if mask is None:
            mask = F.dropout(torch.ones_like(x), 0.25)
        return self.b(x * mask), mask

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, mask = checkpoint(self.part, x, mask, use_reentrant=False)
        return self.c(x), mask


def step(model: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Return the mask and the gradients."""
    out, used = model(x, mask)
    found = torch.autograd.grad((out * torch.arange(4.0)).sum(), list(model.parameters()))
    return used.detach(), list(found)


@pytest.mark.parametrize("options", [{}, {"policy": "exact"}], ids=str)
def test_a_recomputed_dropout_draws_the_mask_of_the_forward(options: dict[str, Any]) -> None:
    model, x = Masked(), torch.randn(256, 16)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=eager_backend("packed", **options))
    masks = []
    for _ in range(2):
        mask, found = step(compiled, x)
        for a, b in zip(found, step(reference, x, mask)[1], strict=True):
            assert relative_error(a, b) < FINE_TOLERANCE
        masks.append(mask)
    assert not torch.equal(*masks), "each step draws anew"
    kept = torch.cat(masks) > 0
    assert 0.74 < kept.float().mean() < 0.76, "32768 draws of probability 0.75: four standard deviations are 0.0096"
    torch.manual_seed(5)
    first = step(compiled, x)[0]
    torch.manual_seed(5)
    assert torch.equal(first, step(compiled, x)[0])
