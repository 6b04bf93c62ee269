"""Generated kernels in Triton's interpreter, beside the plain reference: bit for bit, or within the ulps stated here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from bit_patterns import NAMED, NATIVE, WIDE, bit_patterns, random_formats
from generated.kernel_helpers import EXPONENT, FORMAT, generated, run, scale_table, stored, traced
from helpers import assert_bits_equal, finished
from interpreted import interpreted

import fxprec.runtime.gemm.reference_ops  # noqa: F401
from fxprec.ir import symbolic
from fxprec.ir.symbolic import DEQUANTIZE, QUANTIZE
from fxprec.numerics.formats import parse
from fxprec.passes.lowering.triton.table import EXPRESSIONS, INEXACT, POWERS, name_of

aten = torch.ops.aten


def compare(function, *inputs: torch.Tensor, dynamic: bool = False, **rows) -> tuple[object, list, list]:
    gm = traced(function, *inputs, dynamic=dynamic)
    own, lowered = generated(gm, **rows)
    return lowered, run(own, *inputs), run(gm, *inputs)


def storages(name: str) -> list[str]:
    return ["simulate", "packed", "native"] if name in NATIVE else ["simulate", "packed"]


CASES = [(name, storage) for name in (*NAMED, *random_formats(4), *WIDE) for storage in storages(name)]


def some(patterns: torch.Tensor) -> torch.Tensor:
    """About 600 of them, the edges at the end among them."""
    return torch.cat([patterns[:: len(patterns) // 600 + 1], patterns[-9:]])


@interpreted
@pytest.mark.parametrize("part", range(4))
def test_kernels_round_and_pack_as_the_reference(part: int) -> None:
    """Random bits, ties, edges, infinities and NaN; scaled, so that the table is read. One kernel for many formats."""
    cases = CASES[part::4]
    table = scale_table([name for name, _ in cases], scaled=range(len(cases)))

    def f(x, table):
        x = x * 1.0
        codes = [QUANTIZE(x, table, row, *case) for row, case in enumerate(cases)]
        rows = zip(codes, enumerate(cases), strict=True)
        return codes + [DEQUANTIZE(q, table, row, *case, torch.float32) for q, (row, case) in rows]

    x = torch.cat([some(bit_patterns(500, parse(name))) for name, _ in cases]) * 2.0**-EXPONENT
    lowered, found, wanted = compare(f, x, table, scaled=range(len(cases)))
    assert len(lowered.generated.kernels) == 1
    for i, case in enumerate(cases):
        assert_bits_equal(found[i], wanted[i], f"codes of {case}")
        assert_bits_equal(found[len(cases) + i], wanted[len(cases) + i], f"values of {case}")


@interpreted
def test_a_constant_is_rounded_and_keeps_what_is_not_finite() -> None:
    """As the mask of attention: a kernel without an input, whose number has no bits to look at."""
    table = scale_table(["1-4-3"])

    def f(table):
        x = torch.full((), 0.3)
        q = QUANTIZE(x, table, 0, "1-4-3", "simulate")
        return symbolic.KEEP_NONFINITE(DEQUANTIZE(q, table, 0, "1-4-3", "simulate", torch.float32), x)

    lowered, (found,), (wanted,) = compare(f, table)
    assert len(lowered.generated.kernels) == 1
    assert torch.equal(found, wanted)


@interpreted
@pytest.mark.parametrize("fmt", ["e5m2_sat", "e4m3fn", "1-5-2:ieee"])
def test_codes_that_keep_inf_and_nan_come_out_of_the_kernel_that_rounds(fmt: str) -> None:
    """Scaled, so that what is kept is of the value and not of what is rounded; also where fp8 shows the bytes."""
    table = scale_table([fmt], scaled=[0])
    dtype = parse(fmt).torch_dtype or {"e5m2_sat": torch.float8_e5m2}.get(fmt)

    def f(x, table):
        x = x * 1.0
        codes = QUANTIZE(x, table, 0, fmt, "packed")
        kept = symbolic.KeepCodes.target(codes, x, fmt)
        shown = [] if dtype is None else [symbolic.KEEP_NONFINITE(codes.view(dtype), x).view(torch.uint8)]
        return [codes, kept, *shown]

    x = torch.cat([some(bit_patterns(500, parse(fmt))), torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38])])
    lowered, found, wanted = compare(f, x * 2.0**-EXPONENT, table, scaled=[0])
    (kernel,) = lowered.generated.kernels
    assert ("keep_nonfinite" in kernel.name) == (dtype is not None)
    for one, other in zip(found, wanted, strict=True):
        assert_bits_equal(one, other, fmt)
    assert torch.equal(found[0], found[1]) == (fmt == "1-5-2:ieee")


# What each function may be off, in units in the last place of the exact result, where the interpreter rounds once
# (`rounded_once`): how often a kernel's own expression rounds.
ULPS = {
    "exp2": 1,
    "log2": 1,
    "erf": 1,
    "sqrt": 0.5,
    "rsqrt": 1.5,
    "tanh": 1.5,
    "sin": 1.5,
    "cos": 1.5,
    "exp": 2,
    "log": 2,
    "sigmoid": 2.5,
}
TARGETS = [target for target in EXPRESSIONS if target.startswith("aten.") and target != "aten.clone.default"]


def operator_of(target: str):
    packet, overload = target.split(".")[1:]
    return getattr(getattr(aten, packet), overload)


def applied(target: str, x: torch.Tensor) -> torch.Tensor:
    """The operator on ``x`` and what else it takes."""
    op = operator_of(target)
    if target.endswith("where.self"):
        return op(x > 0, x, 0.5 - x)
    if "logical" in target or "bitwise" in target:
        return op(*[x > 0, x > 1][: 1 if "not" in target else 2])
    kinds = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
    return op(x, *({"Tensor": x * -0.75, "number": 1.7}[kind] for kind in kinds[1:]))


@pytest.fixture
def rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's functions are NumPy's, whose error is that of the processor's code: log2 is 1.4 units off with
    AVX-512. What is left without it is the kernels' own."""
    from triton.runtime.interpreter import InterpreterBuilder

    def of(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: function(x.astype(np.float64)).astype(x.dtype)

    for name in ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt"):
        here = of(getattr(np, name))
        monkeypatch.setattr(InterpreterBuilder, f"create_{name}", lambda self, arg, f=here: self.unary_op(arg, f))


@interpreted
@pytest.mark.cpu_dependent
def test_each_operator_is_atens(rounded_once: None) -> None:
    """Bit for bit; functions that nobody rounds correctly within `ULPS` of the float64 result."""
    x = torch.cat([torch.randn(1500) * 4, torch.tensor([0.0, float("inf"), float("-inf"), float("nan")])])

    def f(x, table):
        x = stored(x, table, 0, "1-8-22")[1]
        return [applied(target, x) for target in TARGETS]

    lowered, found, wanted = compare(f, x, scale_table(["1-8-22"]))
    taken = {str(n.target) for k in lowered.generated.kernels for n in k.region.nodes}
    assert taken >= set(TARGETS)
    x = stored(x, scale_table(["1-8-22"]), 0, "1-8-22")[1]
    for target, got, right in zip(TARGETS, found, wanted, strict=True):
        if name_of(target) in INEXACT:
            exact = operator_of(target)(x.double())
            off = (got.double() - exact) / torch.exp2(exact.abs().clamp_min(2.0**-126).log2().floor() - 23)
            assert torch.equal(got.isnan(), right.isnan()), target
            assert off[exact.isfinite()].abs().max() <= ULPS[name_of(target)], target
        else:
            assert_bits_equal(got, right, target)


@interpreted
def test_powers_are_products() -> None:
    def f(x, table):
        x = stored(x, table, 0, "1-8-22")[1]
        return [x.pow(exponent) for exponent in POWERS]

    lowered, found, wanted = compare(f, torch.rand(300) + 0.1, scale_table(["1-8-22"]))
    assert any(n.target is aten.pow.Tensor_Scalar for k in lowered.generated.kernels for n in k.region.nodes)
    for exponent, got, right in zip(POWERS, found, wanted, strict=True):
        assert torch.allclose(got, right, rtol=3e-7), exponent


@interpreted
@pytest.mark.parametrize("scaled", [(), (0,)])
@pytest.mark.parametrize("storage", ["packed", "simulate"])
def test_statistics_are_those_of_the_reference(scaled, storage) -> None:
    """Ratios and the largest magnitude to the bit over several programs; moments are sums in another order."""
    x = torch.randn(50, 60) * 20
    x[:7] *= 2.0**-15
    x[7] = 0
    for measure in (False, True):
        table = scale_table([FORMAT], scaled=scaled, measure=measure)
        gm = traced(lambda x, table: QUANTIZE(x * 1.5, table, 0, FORMAT, storage), x, table)
        own, lowered = generated(gm, watched=[0], scaled=scaled)
        assert lowered.rows == (0,)
        found, wanted = map(finished, (run(own, x, table)[1], symbolic.Count.target(x * 1.5, table, 0, FORMAT)))
        assert_bits_equal(found[:3], wanted[:3])
        assert torch.allclose(found[3:], wanted[3:], rtol=2e-5)
        assert min(wanted[:2]) > 0, "something over- and underflows"


@interpreted
def test_a_nan_is_seen_by_the_statistics() -> None:
    x, table = torch.tensor([1.0, float("nan"), float("inf")]), scale_table([FORMAT])
    own, _ = generated(traced(lambda x, table: QUANTIZE(x, table, 0, FORMAT, "packed"), x, table), watched=[0])
    overflow, _, amax = finished(run(own, x, table)[1])[:3].tolist()
    assert (overflow, amax) == (pytest.approx(2 / 3), pytest.approx(float("nan"), nan_ok=True))


@interpreted
def test_inputs_in_any_layout() -> None:
    """Transposed, sliced, expanded, channels-last and 0-d inputs; results keep the layout the graph promises."""

    def f(a, b, c, d, s, table):
        y = a.t() + b[:, 1:9] * c.expand(6, 8) - d[2] * s
        return stored(y, table)[0], stored(y.view(2, 3, 8) + 1, table, 1)[1].permute(0, 2, 1).contiguous()

    inputs = torch.randn(8, 6), torch.randn(6, 10), torch.randn(6, 1), torch.randn(3, 8), torch.tensor(0.7)
    lowered, found, wanted = compare(f, *inputs, scale_table([FORMAT] * 2))
    assert lowered.generated.kernels
    for got, right in zip(found, wanted, strict=True):
        assert_bits_equal(got, right)
        assert got.stride() == right.stride()

    def g(x, w, table):
        return stored(torch.relu(x * w.view(1, 5, 1, 1)), table)

    x = torch.randn(2, 5, 4, 3).to(memory_format=torch.channels_last)
    lowered, found, wanted = compare(g, x, torch.randn(5), scale_table([FORMAT]))
    assert_bits_equal(found[1], wanted[1])
    assert found[1].stride() == x.stride()
    (kernel,) = lowered.generated.kernels
    assert "tl.load(in0 + i, mask" in kernel.source, "memory is walked in its own order"


@interpreted
def test_rows_that_no_power_of_two_divides() -> None:
    """Softmax, layer norm and RMS norm over 5 and 1000 columns, leading dimensions merged by a view."""

    def f(x, w, table):
        p = stored(torch.softmax(x, -1), table)[1]
        n = nn.functional.layer_norm(x, x.shape[-1:], w)
        m = nn.functional.rms_norm(n, x.shape[-1:])
        return p, m.mean(-1, keepdim=True), stored(m.view(-1, x.shape[-1]) * 4, table, 1, "1-8-22")[1]

    for shape in ((3, 4, 5), (2, 1, 1000)):
        x = torch.randn(shape) * 3
        lowered, found, wanted = compare(f, x, torch.randn(shape[-1]), scale_table([FORMAT, "1-8-22"]))
        assert any(k.region.columns == shape[-1] for k in lowered.generated.kernels)
        assert (found[0] != wanted[0]).float().mean() < 0.01
        assert torch.allclose(found[2], wanted[2], atol=4e-6)


@interpreted
def test_a_nan_or_an_inf_fills_its_row_only() -> None:
    x = torch.randn(4, 6)
    x[1, 2], x[2, 0] = float("nan"), float("inf")

    def f(x, table):
        return torch.amax(x, -1, True), *stored(torch.softmax(x, -1), table, 0, "1-8-22")

    _, found, wanted = compare(f, x, scale_table(["1-8-22"]))
    assert torch.equal(found[0].isnan(), wanted[0].isnan())
    assert torch.allclose(found[2][[0, 3]], wanted[2][[0, 3]], atol=1e-6)


@interpreted
def test_dynamic_shapes() -> None:
    """One graph, traced at one size and run at others, with a broadcast and a transposed input of dynamic sizes."""

    def f(x, w, b, table):
        y = stored(torch.relu(x) * w + b.t(), table)[1]
        return stored(y.transpose(0, 1) + 1, table, 1, "1-8-22")

    table = scale_table([FORMAT, "1-8-22"], scaled=[1])
    sizes = [(torch.randn(n, m), torch.randn(m), torch.randn(m, n)) for n, m in ((7, 5), (12, 3), (300, 9))]
    gm = traced(f, *sizes[0], table, dynamic=True)
    own, lowered = generated(gm, watched=[0, 1], scaled=[1])
    assert lowered.generated.kernels
    assert not lowered.generated.left
    for inputs in sizes:
        found, wanted = run(own, *inputs, table), run(gm, *inputs, table)
        assert_bits_equal(found[1], wanted[1])
        assert found[1].stride() == wanted[1].stride()


@interpreted
def test_arithmetic_in_16_bits_is_rounded_as_in_the_graph() -> None:
    def f(x, w, table):
        return stored((x * w + 1).float() * 3, table)[0], (x * w).to(torch.float16)

    for dtype in (torch.bfloat16, torch.float16):
        x, w = torch.randn(500).to(dtype), torch.randn(500).to(dtype)
        _, found, wanted = compare(f, x, w, scale_table([FORMAT]))
        assert_bits_equal(found[0], wanted[0])
        assert_bits_equal(found[1], wanted[1])
