"""A model with torch's `scan`: what the scan runs is not planned, and its numbers and gradients are the model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import fxprec


class Scanned(nn.Module):
    """(time, batch, 8) to the same: a GEMM, a scan with a weight of its own, a GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return carry @ self.weight + x, torch.tanh(carry) * x

        carry, y = scan(step, torch.zeros(x.shape[1], 8), self.first(x))
        return self.last(y) + carry


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:scan:fxprec.FxprecWarning")
def test_a_scan_is_what_it_is_uncompiled(training: bool) -> None:
    model, x = Scanned(), torch.randn(5, 4, 8)
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", low_ratio=0.0, lowering="eager"))
    with torch.set_grad_enabled(training):
        found, wanted = torch.compile(model, backend=backend, fullgraph=True)(x), model(x)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
        if training:
            pairs = zip(_gradients(found, model), _gradients(wanted, model), strict=True)
            for a, b in pairs:
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert "the code inside scan is not planned" in " ".join(e.detail for e in backend.events)


def _gradients(y: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().mean(), list(model.parameters())))
