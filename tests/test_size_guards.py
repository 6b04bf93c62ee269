"""Sizes that code compiled outside of Dynamo assumes: other sizes run uncompiled, and a warning says so."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.driver.capture import SizeGuards


def test_the_first_condition_that_sizes_break_is_named() -> None:
    rows, columns, unknown = sympy.symbols("rows columns unknown", positive=True, integer=True)
    guards = SizeGuards(((1, rows), (3, columns)), (sympy.Ne(rows, 1), sympy.Le(rows * columns, 64)))
    assert guards.broken_by((None, 8, None, 8)) == ""
    assert guards.broken_by((None, 9, None, 8)) == "columns*rows <= 64"
    assert guards.broken_by((None, 1, None, 8)) == "Ne(rows, 1)"
    assert SizeGuards(((0, rows),), (sympy.Le(unknown, 2),)).broken_by((1,)) == "unknown <= 2", "undecided"


class Pooled(nn.Module):
    """Its pooling is a loop over windows of fixed size in Inductor's code, for the height that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * 9, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.adaptive_avg_pool2d(F.relu(self.first(x)), (3, 3)).flatten(1))


def test_sizes_that_a_later_compilation_fixed_run_uncompiled() -> None:
    """The step that measures damages is interpreted, so all of Inductor's guards come after Dynamo's check."""
    torch.manual_seed(0)
    model = Pooled()
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", policy="exact"))
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for _ in range(2):
        compiled(torch.randn(4, 3, 16, 16)).sum().backward()
    assert any(event.kind == "relowering" for event in backend.events)
    model.zero_grad()
    x = torch.randn(4, 3, 20, 20)
    with pytest.warns(fxprec.FxprecWarning, match=r"graph 0: runs uncompiled: .*Eq\(s\d+, 16\); torch.compiler.reset"):
        found = compiled(x)
    found.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    wanted = model(x)
    wanted.sum().backward()
    assert torch.equal(found, wanted)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        assert mine is not None
        assert torch.equal(mine, parameter.grad)
    model.zero_grad()
    checkpoint(compiled, x, use_reentrant=False).sum().backward()
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(mine, parameter.grad), "a checkpoint recomputes what its forward ran"
