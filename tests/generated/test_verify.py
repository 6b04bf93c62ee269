"""``verify=True`` for the CPU's kernels: each call beside the symbolic op it stands for."""

from __future__ import annotations

import pytest
import torch
from generated.kernel_helpers import run, scale_table, stored, traced

from fxprec.config import Config
from fxprec.driver.capture import copied
from fxprec.driver.fallback import Lowering
from fxprec.driver.verify import checked_cpu_run
from fxprec.ir import symbolic
from fxprec.numerics.formats import parse
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.runtime.cpu import ops
from fxprec.runtime.cpu.params import params_of


def graph_and_inputs():
    """Codes kept and not, values read back, one storage of its own."""

    def f(x, w, table):
        q, value = stored(torch.relu(x), table)
        _, other = stored(value @ w, table, 1, "bf16", "native")
        return q, symbolic.DEQUANTIZE(q, table, 0, "1-4-3+4", "packed", torch.float32), other * 2

    inputs = torch.randn(20, 16), torch.randn(16, 8), scale_table(["1-4-3+4", "bf16"], scaled=[0])
    return traced(f, *inputs), inputs


def test_right_kernels_have_no_fault() -> None:
    gm, inputs = graph_and_inputs()
    own = copied(gm)
    assert lower(own, "inductor", "cpu", WatchedRows(watched=frozenset({0, 1}), scaled=frozenset({0}))).rows == (0, 1)
    results, faults = checked_cpu_run(own, inputs)
    assert not faults
    for got, right in zip(results, run(gm, *inputs), strict=False):
        assert torch.equal(got, right)


def test_a_wrong_kernel_is_named_and_its_result_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are told another exponent bias than the graph's."""
    wrong = {"1-4-3+4": "1-4-3+5"}
    monkeypatch.setattr(ops, "params_of", lambda fmt, *a, **k: params_of(parse(wrong.get(fmt.name, fmt.name)), *a, **k))
    gm, inputs = graph_and_inputs()
    own = copied(gm)
    lower(own, "inductor", "cpu", WatchedRows(scaled=frozenset({0})))
    results, faults = checked_cpu_run(own, inputs)
    assert {fault.kernel.split(" (")[1] for fault in faults} == {
        "fxprec.store_.default, row 0)",
        "fxprec.load.default, row 0)",
    }
    assert "are not the reference's" in faults[0].reason
    for got, right in zip(results, run(gm, *inputs), strict=False):
        assert torch.equal(got, right)


def test_a_half_without_kernels_is_told_once() -> None:
    told: list[str] = []
    lowering = Lowering(Config(recipe="fp8", verify=True), torch.device("cpu"), lambda n: told.append(n.detail))
    plain = traced(lambda x: x * 2, torch.ones(3))
    for _ in range(2):
        lowering.compile(plain, lambda gm, name, without: Lowered((), ()), lambda gm: gm)
    assert told == [
        "nothing is compared of a graph half whose casts are part of Inductor's own loops; compute='stored' has kernels "
        "to compare"
    ]
