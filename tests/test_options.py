"""Random combinations of options and training loops, and those that were wrong once (``python -m benchmarks.options``)."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not installed

import fxprec
from benchmarks.options.__main__ import case_of, shrunk
from benchmarks.options.check import check

pytestmark = pytest.mark.filterwarnings("ignore")

KEPT: dict[str, dict[str, Any]] = {
    "an error that names a budget which a new search does not reach": {
        "network": "mlp", "recipe": "fp8", "ways": ("narrow", "int2"), "autocast": True, "peak_budget": "85%", "storage": "native",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_was_wrong_once(name: str) -> None:
    assert check(KEPT[name]).failures == []


@pytest.mark.parametrize("seed", [1, 4])
def test_a_random_case_agrees(seed: int) -> None:
    assert check(case_of(seed, Counter())).failures == []


def test_a_planted_fault_is_found_and_its_case_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends forget their state, so that a resumed run measures again."""
    monkeypatch.setattr(fxprec.Backend, "load_state_dict", lambda self, state: None)
    case = {"network": "mlp", "recipe": "near", "policy": "exact", "resume": True, "gemms": "high"}
    verdict = check(case)
    assert verdict.failures[0].startswith("resumed: step 3: ")
    small = shrunk(case, verdict, 60.0)
    assert "gemms" not in small
    assert small.keys() >= {"policy", "resume"}
