"""``verify=True`` for the CPU's kernels: each call beside the symbolic op it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generated.kernel_helpers import run, scale_table, stored, traced

import fxprec.runtime.gemm.reference_ops
import fxprec.runtime.reference_ops  # noqa: F401  registers implementations
from fxprec import compat
from fxprec.compat import copied
from fxprec.config import Config
from fxprec.driver import verify_references
from fxprec.driver.lowering import Lowering
from fxprec.driver.verify import checked_run
from fxprec.driver.verify_references import difference, statistics_differ
from fxprec.ir import symbolic
from fxprec.kernels import casts, coded_gemms
from fxprec.numerics import block_codec, block_device, stats
from fxprec.numerics.blocks import find_blocks
from fxprec.numerics.codec import encode_bits
from fxprec.numerics.formats import parse
from fxprec.passes.lowering.blocks import BlockCall, lower_blocks
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.runtime.cpu import ops
from fxprec.runtime.cpu.ops import params_of


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
    lowered = lower(own, "inductor", "cpu", WatchedRows(watched=frozenset({0, 1}), scaled=frozenset({0})))
    assert lowered.rows == (0, 1)
    results, faults = checked_run(own, gm, lowered, inputs)
    assert not faults
    for got, right in zip(results, run(gm, *inputs), strict=False):
        assert torch.equal(got, right)


def test_a_wrong_kernel_is_named_and_its_result_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are told another exponent bias than the graph's."""
    wrong = {"1-4-3+4": "1-4-3+5"}
    monkeypatch.setattr(ops, "params_of", lambda fmt, *a, **k: params_of(parse(wrong.get(fmt.name, fmt.name)), *a, **k))
    gm, inputs = graph_and_inputs()
    own = copied(gm)
    lowered = lower(own, "inductor", "cpu", WatchedRows(scaled=frozenset({0})))
    results, faults = checked_run(own, gm, lowered, inputs)
    assert {fault.kernel.split(" (")[1] for fault in faults} == {
        "fxprec.store_.default, row 0)",
        "fxprec.load.default, row 0)",
    }
    assert "differ from the reference's" in faults[0].reason
    for got, right in zip(results, run(gm, *inputs), strict=False):
        assert torch.equal(got, right)


def test_a_half_without_kernels_is_told_once() -> None:
    told: list[str] = []
    lowering = Lowering(Config(recipe="fp8", verify=True), torch.device("cpu"), lambda n: told.append(n.detail))
    plain = traced(lambda x: x * 2, torch.ones(3))
    for _ in range(2):
        lowering.compile(plain, lambda gm, name, without: Lowered((), ()), lambda gm: gm)
    assert told == [
        "nothing is compared in a graph half whose casts Inductor compiles into its own loops; on_nonfinite='report' "
        "has kernels to compare"
    ]


TABLE = scale_table(["1-4-3+4", "1-5-2", "bf16"], scaled=[0, 1, 2])


def codes(x: torch.Tensor, row: int, fmt: str) -> torch.Tensor:
    return symbolic.QUANTIZE(x, TABLE, row, fmt, "packed")


def a_product() -> tuple[Any, ...]:
    a, b = codes(torch.randn(24, 16), 0, "1-4-3+4"), codes(torch.randn(16, 8), 1, "1-5-2")
    return a, b, torch.randn(8), TABLE, 0, 1, "1-4-3+4", "1-5-2", torch.float32


def a_call(kind: str) -> tuple[Any, tuple[Any, ...], Any]:
    """An operator, its arguments, and what it returns: added up in float64, where it adds."""
    torch.manual_seed(0)
    if kind == "transpose":
        q = codes(torch.randn(6, 4), 0, "1-4-3+4")
        return coded_gemms.TRANSPOSE_CODES, (q,), q.t().contiguous()
    if kind == "store blocks":
        args = torch.randn(100), None, None, 3, "mxfp6"
        return casts.StoreBlocks.target, args, block_codec.stored(*args)
    if kind == "load blocks":
        q = block_codec.stored(torch.randn(100), None, None, 3, "mxfp6")
        args = q, None, 3, "mxfp6", 100, torch.float32
        return casts.LoadBlocks.target, args, block_codec.loaded(*args)
    if kind == "native gemm":
        a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(32, 16).to(torch.float8_e4m3fn)
        exact = (a.double() @ b.double()) * 0.25
        return torch.ops.aten._scaled_mm.default, (a, b, torch.tensor(0.5), torch.tensor(0.5)), exact.float()
    args = a_product()
    (a, b), bias = (verify_references.numbers(args[i], TABLE, args[4 + i], args[6 + i]) for i in (0, 1)), args[2]
    exact = (a.double() @ b.double() + bias.double()).float()
    if kind == "gemm":
        return coded_gemms.MATMUL_CODES, args, exact
    counts = verify_references._counts_of(exact, TABLE, 1, "1-5-2", moments=False)
    found = codes(exact, 1, "1-5-2"), verify_references._striped(counts)
    return coded_gemms.MatmulToCodes.target, (*args, 1, "1-5-2", "packed", False, True), found


KINDS = ("transpose", "store blocks", "load blocks", "native gemm", "gemm", "gemm to codes")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_kernel_has_a_reference_that_a_right_one_meets_and_a_wrong_one_does_not(kind: str) -> None:
    target, args, found = a_call(kind)
    check = verify_references.REFERENCES[target]
    assert check(found, *args).reason is None
    wrong = found[0] if isinstance(found, tuple) else found
    wrong.view(-1)[3] = -1 - wrong.view(-1)[3] if wrong.dtype.is_floating_point else wrong.view(-1)[3] ^ 0x40
    assert (check(found, *args).reason or "").startswith("1 of ")


def moved(x: torch.Tensor, i: int, to: float) -> torch.Tensor:
    x = x.clone()
    x[i] = to
    return x


def test_what_cancels_may_be_off_by_the_sums_roundings() -> None:
    """A bfloat16 of 1e-7 beside others near 1 has no digits in common with the same difference in another order."""
    wanted = torch.linspace(0.5, 1, 64).bfloat16()
    small, smaller = moved(wanted, 3, 1e-7), moved(wanted, 3, -3e-8)
    assert difference(smaller, small, "x", exact=False) is None
    assert difference(smaller, small, "x", exact=True) == "1 of 64 elements of x differ from the reference's"
    off = difference(moved(wanted, 3, 1e-3), small, "x", exact=False)
    assert off == "1 of 64 codes of x differ from the reference's, 1 of them by more than one code"
    assert difference(moved(wanted, 3, torch.nan), small, "x", exact=False) is not None


def test_a_code_of_what_cancels_may_be_off_by_the_sums_roundings() -> None:
    """Codes of 1e-6 and 2e-6 are a thousand codes apart in 1-6-9; the float32 sums differ by their last places."""
    fmt = parse("1-6-9")
    numbers = torch.linspace(0.5, 1, 64)
    wanted, found = (encode_bits(moved(numbers, 3, x), fmt) for x in (1e-6, 2e-6))
    assert difference(found, wanted, "q", exact=False, fmt=fmt) is None
    off = difference(encode_bits(moved(numbers, 3, 1e-3), fmt), wanted, "q", exact=False, fmt=fmt)
    assert off == "1 of 64 codes of q differ from the reference's, 1 of them by more than one code"


def test_counts_of_values_that_are_not_exact_may_differ_as_these_do() -> None:
    row = torch.tensor([[0.0, 10.0, 1.0, 1000.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for change, is_near in (({1: 11.0}, True), ({1: 300.0}, False), ({2: 1 + 1e-6}, True), ({2: 1.01}, False)):
        other = row.clone()
        for column, number in change.items():
            other[0, column] = number
        assert bool(statistics_differ(other, row)[0]), change
        assert bool(statistics_differ(other, row, torch.tensor([True]))[0]) is not is_near, change


@pytest.mark.parametrize(("name", "dtype"), [("e5m2", torch.uint8), ("1-3-0", torch.uint8), ("1-6-9", torch.uint16)])
def test_zero_stands_between_the_least_codes_of_both_signs(name: str, dtype: torch.dtype) -> None:
    fmt = parse(name)
    minus = 1 << (fmt.bits - 1)
    wanted = torch.zeros(64, dtype=dtype)
    for code, is_near in ((1, True), (minus, True), (minus + 1, True), (2, False), (minus + 2, False)):
        said = difference(moved(wanted, 5, code), wanted, "q", exact=False, fmt=fmt)
        assert (said is None) is is_near, code


def test_wrong_counts_of_a_product_are_seen() -> None:
    target, args, (q, counters) = a_call("gemm to codes")
    counters[0] += q.numel()  # what overflows
    assert verify_references.REFERENCES[target]((q, counters), *args).reason == (
        "its statistics of row 1 differ from the reference's"
    )


def test_counters_made_of_a_row_amount_to_it() -> None:
    counts = torch.tensor([3, 4, 2.5, 100, 90, 1.5, -2.25, 7, -3, 2], dtype=torch.float64)
    assert torch.equal(stats.gathered(verify_references._striped(counts))[0], counts)


@pytest.mark.parametrize("name", ["store", "load"])
def test_a_block_kernel_that_fails_is_left_out(name: str) -> None:
    """The casts of a checked run would have failed again in each step."""
    pytest.importorskip("triton")
    from generated.test_generated_blocks import graph_of

    gm = graph_of("mxfp6", torch.randn(64), torch.float32, stochastic=False)
    fmt = find_blocks("mxfp6")
    kernel = block_device.store_kernel(fmt, stochastic=False) if name == "store" else block_device.load_kernel(fmt)
    lower_blocks(gm, "triton", "cuda", compat.TritonCalls(), without={kernel.name})
    (left,) = (found for n in gm.graph.nodes if (found := BlockCall.of(n)) is not None)
    assert left.stores is (name == "load")
