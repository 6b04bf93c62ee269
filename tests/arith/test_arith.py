"""Products and sums at any precision: against exact fractions, then kernel and Triton against the reference."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import interpreted
from torch import Tensor

import fxprec
from fxprec import arith
from fxprec.numerics.formats import Format, parse
from fxprec.runtime.arith import reference
from fxprec.runtime.arith.spec import Spec

# fmt, accumulate, kahan, chunk: the papers' formats, every path of the kernels.
CASES = [
    ("1-4-3", "1-5-2", False, None),  # rounds to odd: the accumulator is narrower than the products
    ("1-4-3+4", "1-6-9", False, None),
    ("1-4-3", "1-5-2", True, None),
    ("1-5-2", "1-6-9", True, 16),
    ("1-5-2", "fp32", False, 7),
    ("bf16", "bf16", False, None),
    ("fp16", "fp16", True, None),
    ("e4m3fn", "fp16", False, 8),
    ("1-8-15:ieee", "1-8-12:ieee", False, None),  # products wider than float32
    ("1-3-0", "1-4-3", False, None),
    ("fp32", "fp32", False, None),
]


def operands(m: int, k: int, n: int, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=g), torch.randn(k, n, generator=g)
    return a * scale * 2.0 ** torch.randint(-6, 6, a.shape, generator=g), b * 2.0 ** torch.randint(
        -6, 6, b.shape, generator=g
    )


def nearest_fraction(x: Fraction, fmt: Format) -> Fraction:
    """Nearest number of a saturating or IEEE format, ties to the even code, from the definition."""
    if x == 0:
        return x
    size = abs(x)
    exponent = fmt.min_exponent
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - fmt.mantissa_bits)
    rounded = round(size / unit) * unit  # Python rounds halves to even
    largest = Fraction(fmt.largest)
    if rounded > largest:
        assert fmt.overflow == "saturate", "choose values that stay in range"
        rounded = largest
    return rounded if x > 0 else -rounded


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize(
    ("fmt", "accumulate"),
    [("1-4-3", "1-5-2"), ("1-5-2", "1-6-9"), ("1-8-15:ieee", "1-8-7:ieee"), ("bf16", "1-8-2:ieee")],
)
@pytest.mark.parametrize("kahan", [False, True])
def test_every_operation_is_exact_and_rounded_once(fmt: str, accumulate: str, kahan: bool, method: str) -> None:
    """The definition in fractions, of which no rounding is done but ours."""
    a, b = operands(3, 24, 3)
    f, acc = parse(fmt), parse(accumulate)
    a[0, ::3] *= 2.0**-20  # small beside large: sums that float32 cannot hold
    found = arith.matmul(a, b, fmt, accumulate, kahan, method=method)  # type: ignore[arg-type]
    for i in range(3):
        for j in range(3):
            s = c = Fraction(0)
            for k in range(24):
                left, right = (nearest_fraction(Fraction(t.item()), f) for t in (a[i, k], b[k, j]))
                p = nearest_fraction(left * right, f)
                if kahan:
                    y = nearest_fraction(p - c, acc)
                    t = nearest_fraction(s + y, acc)
                    c = nearest_fraction(nearest_fraction(t - s, acc) - y, acc)
                    s = t
                else:
                    s = nearest_fraction(s + p, acc)
            assert Fraction(found[i, j].item()) == s, (i, j)


def test_rounding_twice_would_be_seen() -> None:
    """1 + 2^-30 beside a tie of the accumulator: a float32 sum loses the 2^-30 and lands on the tie."""
    x = torch.tensor([1.125, 2.0**-30])
    assert float(arith.sum(x, "bf16", "1-8-2:ieee")) == 1.0  # 1.125 is a tie itself: rounded before 2^-30 comes
    assert float(arith.sum(x.flip(0), "bf16", "1-8-2:ieee")) == 1.25


@pytest.mark.parametrize(("fmt", "accumulate", "kahan", "chunk"), CASES)
def test_the_kernel_gives_the_bits_of_the_reference(fmt: str, accumulate: str, kahan: bool, chunk: int | None) -> None:
    for m, k, n, scale in ((33, 50, 70, 1.0), (5, 40, 64, 3e4), (4, 40, 65, 1e-6), (2, 0, 3, 1.0), (1, 300, 1, 1.0)):
        a, b = operands(m, k, n, scale)
        wanted = arith.matmul(a, b, fmt, accumulate, kahan, chunk=chunk, method="reference")
        found = arith.matmul(a, b, fmt, accumulate, kahan, chunk=chunk)
        assert torch.equal(found.view(torch.int32)[~wanted.isnan()], wanted.view(torch.int32)[~wanted.isnan()])
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(0), fxprec.quantize(found, accumulate).nan_to_num(0))


@pytest.mark.parametrize("fmt", ["1-4-3", "bf16", "e4m3fn"])
def test_inf_and_nan_are_kept_where_the_format_can(fmt: str) -> None:
    a, b = operands(3, 6, 4)
    a[0, 2], a[1, 3] = torch.nan, torch.inf
    wanted = arith.matmul(a, b, fmt, method="reference")
    found = arith.matmul(a, b, fmt)
    assert found[0].isnan().all()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0), wanted.nan_to_num(0))


def test_512_deep_sums_in_the_papers_formats_are_bit_exact() -> None:
    a, b = operands(48, 512, 80)
    for accumulate in ("1-5-2", "1-6-9"):
        assert torch.equal(
            arith.matmul(a, b, "1-4-3", accumulate), arith.matmul(a, b, "1-4-3", accumulate, method="reference")
        )


def test_sum_dot_and_batches_are_products_of_the_same_kind() -> None:
    x = torch.randn(3, 20, 5)
    one_by_one = torch.stack(
        [arith.dot(torch.ones(20), x[i, :, j], "1-5-2", "1-6-9", True) for i in range(3) for j in range(5)]
    )
    assert torch.equal(arith.sum(x, "1-5-2", "1-6-9", True, dim=1).flatten(), one_by_one)
    a, b = torch.randn(2, 1, 4, 6), torch.randn(3, 6, 5)
    whole = arith.matmul(a, b, "1-4-3")
    assert whole.shape == (2, 3, 4, 5)
    assert torch.equal(whole[1, 2], arith.matmul(a[1, 0], b[2], "1-4-3"))
    assert arith.matmul(torch.ones(0, 2, 3), torch.ones(3, 4), "bf16").shape == (0, 2, 4)


def test_a_low_precision_accumulator_swamps_and_kahan_and_chunks_help() -> None:
    """4,096 ones in 1-5-2 stop at 8, the paper's Figure 12 in small; Kahan and chunks go on."""
    ones = torch.ones(4096)
    assert float(arith.sum(ones, "1-5-2")) == 8.0
    assert float(arith.sum(ones, "1-5-2", chunk=8)) == 64.0
    assert float(arith.sum(ones, "1-5-2", kahan=True)) == 64.0  # then the compensation swamps too
    assert float(arith.sum(ones, "1-5-2", "fp32")) == 4096.0


def test_inputs_are_not_overwritten() -> None:
    a, b = operands(4, 5, 6)
    kept = a.clone(), b.clone()
    arith.matmul(a, b, "1-2-1")
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: arith.matmul(torch.ones(2, 3), torch.ones(2, 3), "bf16"), "do not multiply: give"),
        (lambda: arith.matmul(torch.ones(3), torch.ones(3), "bf16"), "for vectors use fxprec.arith.dot"),
        (lambda: arith.dot(torch.ones(3), torch.ones(4), "bf16"), "have no dot product"),
        (lambda: arith.sum(torch.tensor(1.0), "bf16"), "no dimension to sum over"),
        (lambda: arith.sum(torch.ones(3), "1-8-22:ieee"), "one mantissa bit less than float32"),
        (lambda: arith.sum(torch.ones(3), "bf17"), "unknown format 'bf17'; did you mean 'bf16'"),
        (lambda: arith.sum(torch.ones(3), "bf16", chunk=0), "chunk is 0; give it a number of products"),
        (lambda: arith.sum(torch.ones(3).double(), "bf16"), "float64 would be rounded twice"),
        (lambda: arith.sum(torch.ones(3), "bf16", method="fast"), "method='fast' is unknown"),
    ],
)  # fmt: skip
def test_what_is_refused_and_what_it_says(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(fxprec.FormatError, match=words):
        call()


@interpreted
@pytest.mark.parametrize(("fmt", "accumulate", "kahan", "chunk"), CASES)
def test_triton_kernels_give_the_bits(fmt: str, accumulate: str, kahan: bool, chunk: int | None) -> None:
    from fxprec.runtime.arith import triton_kernel

    a, b = operands(5, 9, 35)
    spec = Spec(parse(fmt), parse(accumulate), kahan, chunk or 0)
    a, b = fxprec.quantize(a, fmt), fxprec.quantize(b, fmt)
    with np.errstate(all="ignore"):  # the interpreter is NumPy
        found = triton_kernel.matmul(a, b, spec)
    assert torch.equal(found.view(torch.int32), reference.matmul(a, b, spec).view(torch.int32))


@pytest.mark.parametrize("arch", [80, 90, *(pytest.param(arch, marks=pytest.mark.full) for arch in (89, 100))])
def test_triton_kernels_compile_for_every_architecture(arch: int) -> None:
    pytest.importorskip("triton")
    from fxprec.runtime.arith import triton_kernel

    text = triton_kernel.compile_to_ptx(Spec(parse("1-4-3"), parse("1-5-2"), True, 16), arch)
    assert "mul.f32" in text or "mul.rn.f32" in text
    assert "fma" not in text


def test_a_wide_product_starts_in_one_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has no more than 65,535 programs in the second: of 2.1 million columns the launch was an error."""
    pytest.importorskip("triton")
    from fxprec.runtime.arith import triton_kernel

    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(triton_kernel, "_matmul_kernel", Kernel())
    monkeypatch.setattr(triton_kernel, "_flags", lambda spec: {})
    columns = 32 * (1 << 16)
    triton_kernel.matmul(torch.empty(33, 1), torch.empty(1, columns), SimpleNamespace(chunk=0))
    assert grids == [(2 << 16,)]
