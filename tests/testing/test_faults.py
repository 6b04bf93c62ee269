"""The check catches all faults planted into fxprec. Their table: python -m benchmarks.planted_faults."""

from __future__ import annotations

import pytest

from benchmarks.faults import FAULTS
from benchmarks.planted_faults import caught, kinds

PLAN = ("swaps the formats of forward and backward", "groups off by one")
"""Faults that the plan shows, beside the statistics."""


@pytest.fixture(scope="module")
def goldens(tmp_path_factory):
    return tmp_path_factory.mktemp("goldens")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_is_caught(fault, goldens):
    outcome = caught(fault, goldens)  # passes without the fault, or raises
    wanted = {"statistics", "plan"} if fault.what in PLAN else {"statistics"}
    assert wanted <= set(kinds(outcome)), outcome.message()
    if fault.what.startswith("gradients"):
        wrong = {f.tensor for f in outcome.findings}
        assert {"up.weight.grad", "mix.weight.grad"} <= wrong
        assert not wrong & {"output", "loss"}
