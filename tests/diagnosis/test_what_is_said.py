"""What a diagnosis says agrees with its recommendation; what no module made is named by its source line."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.diagnosis.page import page
from fxprec.diagnosis.text import modules

KEEP = "Keep high first"


class Net(nn.Module):
    """Multiplies outside of every module, by ``scale``; a large one overflows e4m3fn."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(16, 32), nn.Linear(32, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = torch.cumsum(torch.tanh(hidden) * self.scale * hidden, 1)
        return self.last(hidden / self.scale)


def diagnosed(scale: float, **options: object) -> fxprec.Diagnosis:
    torch.manual_seed(0)
    given = {"formats": ("e4m3fn",), "reruns": 0, **options}
    return fxprec.doctor(Net(scale), torch.randn(64, 16), options=given)


def test_where_all_may_be_low_nothing_is_to_be_kept_high() -> None:
    found = diagnosed(1.0)
    assert "all tensors may be low" in str(found)
    assert KEEP not in str(found)
    assert KEEP not in page(found)
    assert "Most of the damage, still within the tolerance: " in str(found)


def test_where_something_must_stay_high_it_is_named_first() -> None:
    found = diagnosed(1.0, tolerance=1e-4)
    assert found.advice.holds_high
    assert f"{KEEP}: " in str(found)
    assert KEEP in page(found)


def test_what_no_module_made_is_named_by_its_line() -> None:
    found = diagnosed(1.0)
    rows = [row for row in found.ranking if row.source and not row.module]
    lines, start = inspect.getsourcelines(Net.forward)
    here = {f"{Path(__file__).name}:{start + i}" for i in range(len(lines))}
    assert {row.source for row in rows} <= here
    assert rows
    assert all(f'"module":"{row.source}"' in page(found) for row in rows)
    groups = {row.group: row.source for row in rows}
    assert all(groups[g.group] in g.modules for g in found.groups if g.group in groups)
    assert any(line in modules(g) for g in found.groups for line in here)


@pytest.mark.parametrize("name", ["dump", "dump_tensors"])
def test_the_recommendation_repeats_no_dump(tmp_path: Path, name: str) -> None:
    options = {"dump": str(tmp_path)} | ({"dump_tensors": ("first:output",)} if name == "dump_tensors" else {})
    found = diagnosed(1.0, low_ratio=0.9, **options)
    assert found.recommended == {"recipe": "fp8", "low_ratio": 0.9}
