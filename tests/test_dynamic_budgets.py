"""``peak_budget`` where sizes vary: up to which size a plan keeps it."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import eager_backend
from models import Parts
from torch import Tensor, nn

import fxprec
from fxprec.passes.crossings.best_of import BestOf


def attends() -> nn.Module:
    """Bytes grow with the batch, and with the square of the length: scores are kept."""
    layers = {"q": nn.Linear(16, 16), "k": nn.Linear(16, 16)}
    return Parts(lambda m, x: (F.gelu(m.q(x)) @ m.k(x).mT).softmax(-1) @ x, **layers)


def dynamic(model: nn.Module, budget: str | int, x: Tensor, *dims: int) -> tuple[Any, fxprec.Backend]:
    torch._dynamo.reset()
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget=budget)
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    return torch.compile(model, backend=backend), backend


def planned(model: nn.Module, x: Tensor) -> int:
    """Return the bytes that a step of this one size is predicted to hold."""
    run, backend = dynamic(model, 1_000_000, x)
    run(x).sum().backward()
    peak = backend.plans[0].peak_bytes
    assert peak is not None
    return peak.planned


def test_the_largest_size_that_keeps_the_budget_is_in_the_notes_and_a_larger_call_is_told() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(16, 8)
    run, backend = dynamic(model, 20_000, x, 0)
    run(x).sum().backward()
    note = next(note for note in backend.plans[0].notes if note.startswith("peak budget: chosen"))
    symbol, largest = re.search(r"traced sizes, (s\d+) = 16; it holds up to s\d+ = (\d+)$", note).groups()  # type: ignore[union-attr]
    assert int(largest) > 16
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxprec.FxprecWarning)
        run(torch.randn(int(largest), 8)).sum().backward()
    with pytest.warns(fxprec.FxprecWarning, match=rf"a step of {symbol} = {int(largest) + 1} is predicted to hold"):
        run(torch.randn(int(largest) + 1, 8)).sum().backward()
    within, above = (planned(model, torch.randn(n, 8)) for n in (int(largest), int(largest) + 1))
    assert within <= 20_000 < above


class HalvesRows(nn.Module):
    """One more row than is even is no polynomial in the rows: a chunk's size is a floor division."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.gelu(self.up(x)).chunk(2, 0)
        return self.down(first).sum() + self.down(second.sin()).square().sum()


def test_sizes_of_a_chunk_are_counted_at_other_sizes() -> None:
    run, _ = dynamic(HalvesRows(), "90%", torch.randn(30, 16), 0)
    run(torch.randn(30, 16)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxprec.FxprecWarning)
        run(torch.randn(29, 16)).backward()
    with pytest.warns(fxprec.FxprecWarning, match=r"a step of s\d+ = 301 is predicted to hold"):
        run(torch.randn(301, 16)).backward()


def test_with_two_sizes_each_has_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BestOf, "unchanged", lambda *_: None)  # the choice without a budget leaves room
    torch.manual_seed(0)
    x = torch.randn(4, 64, 16)
    run, backend = dynamic(attends(), "100%", x, 0, 1)
    run(x).sum().backward()
    note = next(note for note in backend.plans[0].notes if note.startswith("peak budget: chosen"))
    assert re.search(r"up to s\d+ = \d+ where s\d+ = \d+; up to s\d+ = \d+ where s\d+ = \d+$", note), note
    assert re.search(r"up to s\d+ = 4 where s\d+ = 64", note), "a budget of all that is held leaves no room"
    assert re.search(r"up to s\d+ = 64 where s\d+ = 4", note), "a budget of all that is held leaves no room"
