"""The Triton kernels around GEMMs: bits against the reference in the interpreter, machine code without a GPU."""

from __future__ import annotations

import math
import operator
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemm_helpers import half_graph, table_of
from helpers import UNMEASURED
from interpreted import interpreted

import fxprec.runtime.gemm.ops
import fxprec.runtime.gemm.reference_ops
import fxprec.runtime.reference_ops  # noqa: F401
from fxprec.errors import LoweringError
from fxprec.gpu_check.samples import hard_numbers
from fxprec.ir import symbolic
from fxprec.kernels import coded_gemms, counts
from fxprec.numerics import stats
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.reference import reference_decode, reference_encode, reference_stats
from fxprec.numerics.rows import format_row
from fxprec.numerics.stats import WIDTH, Counts, finish, gathered
from fxprec.passes.lowering.gemms import lower_gemms
from fxprec.passes.lowering.stats import Counters, append_gathered, watch

# Every family and overflow rule, no mantissa, one exponent bit, odd biases, and 16-bit codes.
FORMATS = [
    "e4m3fn", "e4m3fn_nan", "e5m2", "e5m2_sat", "1-4-3", "1-4-3+4", "1-5-2", "1-3-0", "1-2-1", "1-1-3", "1-7-0",
    "1-5-2-100", "1-4-3-70:fn", "1-8-5:ieee", "1-8-7", "1-6-9", "bf16", "fp16_sat",
]  # fmt: skip
PAIRS = [
    ("e4m3fn", "e5m2_sat"), ("1-4-3+4", "1-5-2"), ("1-3-0", "e4m3fn"), ("1-6-9", "1-4-3"), ("fp16", "1-4-3"),
]  # fmt: skip


WATCHED = (0, 1, 2)


def counted(counters: Tensor) -> Counts:
    return Counts(*gathered(counters)[0].tolist())


def exponent(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


def row_of(fmt: Format, exp: int = 0) -> Tensor:
    return table_of((exp, fmt.name))[0]


@interpreted
@pytest.mark.parametrize("name", FORMATS)
def test_interpreted_both_copies_have_the_bits_of_the_reference(name: str) -> None:
    from fxprec.runtime.gemm.transpose import quantize_transpose

    fmt, x = parse(name), hard_numbers(67, 131)  # edges of the tiles
    with np.errstate(all="ignore"):
        q, t, counters = quantize_transpose(x, row_of(fmt, 3), fmt)
    wanted, stats = reference_encode(x * 8.0, fmt), reference_stats(x * 8.0, fmt)
    assert torch.equal(q.long(), wanted.long())
    assert torch.equal(t.long(), wanted.t().long())
    assert t.is_contiguous()
    counts = counted(counters)
    assert (counts.overflow, counts.underflow, counts.elements) == (stats.overflow, stats.underflow, x.numel())
    assert math.isnan(counts.amax)


@interpreted
def test_interpreted_layouts_dtypes_and_kept_infinities() -> None:
    from fxprec.runtime.gemm.transpose import quantize_transpose, transpose

    fmt, x = parse("e5m2_sat"), hard_numbers(40, 70)
    with np.errstate(all="ignore"):
        for source in (x.t().contiguous().t(), hard_numbers(80, 70)[::2], x.bfloat16(), x.half()):
            q, t, _ = quantize_transpose(source, row_of(fmt), fmt)
            assert torch.equal(q, reference_encode(source.float(), fmt))
            assert torch.equal(t, q.t())
        q, t, counters = quantize_transpose(x, row_of(fmt), fmt, keep=True)
    finite = x.isfinite()
    assert torch.equal(finite, reference_decode(q, fmt).isfinite())
    assert torch.equal(q[finite], reference_encode(x, fmt)[finite])
    assert torch.equal(transpose(q.t()), q.contiguous())
    assert counted(counters).overflow == reference_stats(x, fmt).overflow
    assert quantize_transpose(x[:0], row_of(fmt), fmt)[1].shape == (70, 0)


KEPT = ["e4m3fn", "e4m3fn_nan", "e5m2", "e5m2_sat", "1-4-3-70:fn", "1-8-5:ieee", "fp16_sat"]


@interpreted
@pytest.mark.parametrize("name", KEPT)
def test_interpreted_codes_that_keep_infinities_have_the_bits_of_the_reference(name: str) -> None:
    from fxprec.runtime.gemm.transpose import quantize_transpose

    fmt, x = parse(name), hard_numbers(33, 65)
    with np.errstate(all="ignore"):
        q, t, _ = quantize_transpose(x, row_of(fmt), fmt, keep=True)
    assert torch.equal(t, q.t())
    finite, back = x.isfinite(), reference_decode(q, fmt)
    assert torch.equal(q[finite].long(), reference_encode(x[finite], fmt).long())
    assert bool(back[x.isnan()].isnan().all())
    kept = back[x.isinf()]
    assert bool((kept == x[x.isinf()]).all() if fmt.specials == "ieee" else kept.isnan().all())


@interpreted
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_interpreted_products_are_exact_where_float32_sums_are(first: str, second: str) -> None:
    """Small whole numbers: no sum rounds, so no order of summation is right or wrong."""
    from fxprec.runtime.gemm.matmul import Operand, matmul

    fa, fb = parse(first), parse(second)
    g = torch.Generator().manual_seed(0)
    a, b = (
        2.0 ** torch.randint(0, 3, s, generator=g) * torch.randint(-1, 2, s, generator=g) for s in ((37, 70), (70, 45))
    )
    qa, qb = reference_encode(a, fa), reference_encode(b, fb)
    wanted = reference_decode(qa, fa, torch.float64) @ reference_decode(qb, fb, torch.float64)
    for right in (qb, qb.t().contiguous().t()):
        found, _ = matmul(Operand(qa, fa, exponent(3)), Operand(right, fb, exponent(-1)))
        assert torch.equal(found.double() * 4, wanted)
    bias = torch.arange(45.0)
    found, _ = matmul(Operand(qa, fa), Operand(b.half()), bias)
    assert torch.equal(found.double(), reference_decode(qa, fa, torch.float64) @ b.double() + bias)
    for dtype in (torch.bfloat16, torch.float16):
        narrow, _ = matmul(Operand(qa, fa), Operand(b.half()), bias / 3, dtype)
        assert torch.equal(narrow, matmul(Operand(qa, fa), Operand(b.half()), bias / 3)[0].to(dtype)), "to the nearest"


@interpreted
def test_interpreted_sums_stay_within_float32s_error_of_float64() -> None:
    """At most k roundings of 2^-24 of the sum of magnitudes, in whatever order."""
    from fxprec.runtime.gemm.matmul import Operand, matmul

    fmt, k = parse("e4m3fn"), 300
    qa, qb = reference_encode(torch.randn(20, k), fmt), reference_encode(torch.randn(k, 33), fmt)
    a, b = (reference_decode(q, fmt, torch.float64) for q in (qa, qb))
    found, _ = matmul(Operand(qa, fmt), Operand(qb, fmt))
    assert ((found.double() - a @ b).abs() <= k * 2.0**-24 * (a.abs() @ b.abs())).all()


@interpreted
def test_interpreted_products_are_encoded_and_counted_on_the_way_out() -> None:
    from fxprec.runtime.gemm.matmul import Operand, Output, matmul

    fmt, out = parse("1-4-3+4"), parse("1-5-2")
    g = torch.Generator().manual_seed(0)
    operands = [Operand(reference_encode(torch.randn(s, generator=g), fmt), fmt) for s in ((37, 70), (70, 45))]
    bias = torch.randn(45, generator=g)
    bias[0], bias[1] = torch.inf, 1e12
    plain, _ = matmul(*operands, bias, torch.bfloat16)
    codes, counters = matmul(*operands, bias, torch.bfloat16, Output(out, row_of(out, -16)))
    assert plain.dtype == torch.bfloat16
    assert torch.equal(codes, reference_encode(plain.float() * 2.0**-16, out))
    right = reference_stats(plain.float() * 2.0**-16, out)
    counts = counted(counters)
    assert (counts.overflow, counts.underflow, counts.elements) == (right.overflow, right.underflow, plain.numel())
    assert counts.nonzero == -1, "no moments"
    assert right.overflow > 37 < right.underflow


@interpreted
@pytest.mark.parametrize("measure", [0, 1])
def test_interpreted_graphs_do_casts_statistics_and_products_in_kernels(measure: int) -> None:
    table = table_of((0, "e4m3fn"), (5, "e5m2_sat"), (-4, "1-5-2"), carried=2, measure=measure)
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(64, 32, generator=g) * 200, torch.randn(64, 48, generator=g)
    dy[3, 4] = torch.inf if not measure else 0.0
    plain, gm = half_graph(table), half_graph(table)
    rows, nodes = watch(plain, WATCHED)
    append_gathered(plain.graph, nodes)
    plain.recompile()
    counters = Counters(WATCHED)
    lower_gemms(gm, "cpu", frozenset({1, 2}), counters)
    append_gathered(gm.graph, counters.gathered(gm.graph))
    gm.recompile()
    names = [n.target for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert names.count(coded_gemms.QuantizeTranspose.target) == 2
    assert names.count(coded_gemms.MatmulToCodes.target) == 1
    assert names.count(torch.ops.aten._scaled_mm.default) == 1
    assert names.count(counts.GATHERED) == 1
    assert not {symbolic.QUANTIZE, symbolic.TRANSPOSED} & set(names), "one read of each source"
    assert sorted(rows) == sorted(counters.rows) == list(WATCHED)
    *wanted, wanted_counts = plain(x, dy, table)
    *found, found_counts = gm(x, dy, table)
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.float().nan_to_num(7.0, 8.0, 9.0), b.float().nan_to_num(7.0, 8.0, 9.0))
    theirs = dict(zip(rows, finish(wanted_counts.view(-1, WIDTH)), strict=True))
    for row, mine in zip(counters.rows, finish(found_counts.view(-1, WIDTH)), strict=True):
        assert mine[:3] == theirs[row][:3]
        if row == 2 or not measure:  # a product's moments are not measured in its kernel
            assert mine[3:] == UNMEASURED
        else:
            assert mine[3:] == pytest.approx(theirs[row][3:], rel=2e-6)


@pytest.mark.parametrize("measured", [False, True])
def test_one_sum_holds_what_over_and_underflows_of_a_short_part(measured: bool) -> None:
    longest = stats.SHORT - 1
    x = torch.randn(6, longest, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-6, 6, 2)[:, None]
    x[0], x[1], x[2, ::2] = torch.inf, 1e-30, 0
    row = format_row(parse("e4m3fn"))
    wanted, found = (stats.count_parts(x, x, row, (-1,), measured, short) for short in (False, True))
    assert wanted[1][0] == wanted[2][1] == longest
    assert {number.dtype for number in found[: 2 + measured]} == {torch.int32}
    lost = found[1] & stats.SHORT - 1, found[1] >> stats.SHORT_BITS
    for got, right in zip((found[0], *lost, *found[2:]), wanted, strict=True):
        assert got.dtype == right.dtype
        assert torch.equal(got, right)


@interpreted
@pytest.mark.parametrize("outer", [1, 2, 9])
def test_interpreted_parts_are_added_up(outer: int) -> None:
    """Of four casts, counted in parts side by side; against statistics of each tensor as a whole.

    One program, two, and eight share the parts of the largest.
    """
    from fxprec.runtime.gemm import totals

    assert totals.splits_of(outer * 1100) == {1: 1, 2: 2, 9: 8}[outer]

    fmt, g = parse("e4m3fn"), torch.Generator()
    table = table_of((4, "e4m3fn"), (0, "e4m3fn"), (1, "e4m3fn"), (2, "e4m3fn"), carried=2, measure=1)
    table[1, symbolic.MEASURE] = 0  # counted, and not asked for in this step
    # Row, parts, elements of each, measured, short.
    cases = ((2, 700, 30, False, False), (0, 1100, 8, True, True), (1, 1, 5, True, False), (3, 9, 40, False, True))
    parts, wanted = [], []
    for row, size, length, measured, short in cases:
        x = torch.randn(outer, size, length) * 10 ** torch.randn(outer, size, length, generator=g)
        x[0, 0, 0] = 0
        stored = x * 2.0 ** int(table[row, 0])
        parts.append(stats.count_parts(x, stored, format_row(fmt), (-1,), measured, short))
        asked = measured and row != 1
        whole = stats.count(x, stored, format_row(fmt)) + (stats.count_moments(stored) if asked else [])
        wanted.append([*map(float, whole), *(() if asked else stats.UNMEASURED), 2.0, 2.0 + int(table[row, 0])])
    counts, moments = (
        torch.cat([number for part in parts for number in part if number.dtype == dtype], -1)
        for dtype in (torch.int32, torch.float32)
    )
    rows, sizes, lengths, measured, short = (list(column) for column in zip(*cases, strict=True))
    elements = [outer * s * n for s, n in zip(sizes, lengths, strict=True)]
    sites = stats.parts_of(rows, sizes, elements, measured, [True] * 4, short)
    assert sum(size * (3 + m - s) for size, m, s in zip(sizes, measured, short, strict=True)) == counts.shape[-1]
    reference = stats.totals(counts, moments, table, sites)
    found = totals.totals(counts, moments, table, sites)
    assert torch.allclose(found, reference, rtol=1e-12)
    assert torch.equal(found[:, :5], torch.tensor(wanted, dtype=torch.float64)[:, :5])
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-5)


def test_without_a_device_the_kernels_say_so() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("here they run")
    with pytest.raises(LoweringError, match=r"Triton kernels do not run on 'cpu'; move the tensors to 'cuda'"):
        torch.ops.fxprec.transpose_codes(torch.zeros(2, 2, dtype=torch.uint8))


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from fxprec.runtime.gemm import ops, transpose

    def broken(q: Tensor) -> Tensor:
        raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(ops, "_check_device", lambda x: None)
    monkeypatch.setattr(transpose, "transpose", broken)
    words = r"kernel of fxprec::transpose_codes does not run on cpu: .*shared memory.*'gemms': 'high'"
    with pytest.raises(LoweringError, match=words):
        torch.ops.fxprec.transpose_codes(torch.zeros(2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code_spills_no_registers(arch: int) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted functions have no machine code")
    from fxprec.numerics import ahead
    from fxprec.runtime.gemm import kernels

    for case in kernels.cases(arch, quick=True):
        used = ahead.resources(case.compile(arch), arch)
        assert used.fits, (case.name, used)
        assert used.registers > 0
