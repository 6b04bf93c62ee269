"""The check catches faults planted into fxprec. All of them: python -m benchmarks.planted_faults."""

from __future__ import annotations

import pytest

from benchmarks.faults import FAULTS
from benchmarks.planted_faults import caught, kinds

BY = {
    "rounds toward zero": "statistics",
    "loses the scales": "statistics",
    "swaps the formats of forward and backward": "plan",
    "leaves an operator high, though planned low": "statistics",
    "gradients 1 % too large": "statistics",
    "groups off by one": "plan",
}


@pytest.fixture(scope="module")
def goldens(tmp_path_factory):
    return tmp_path_factory.mktemp("goldens")


@pytest.mark.parametrize("what", BY)
def test_fault_is_caught(what, goldens):
    (fault,) = (f for f in FAULTS if f.what == what)
    outcome = caught(fault, goldens)  # passes without the fault, or raises
    assert BY[what] in kinds(outcome), outcome.message()
    if what.startswith("gradients"):
        wrong = {f.tensor for f in outcome.findings}
        assert {"up.weight.grad", "mix.weight.grad"} <= wrong
        assert not wrong & {"output", "loss"}
