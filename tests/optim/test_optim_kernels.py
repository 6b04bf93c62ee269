"""The generated kernels against the plain reference, bit for bit: C++ here, Triton in its interpreter and as PTX."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from interpreted import InterpretedTests, interpreted
from optim.rules import RULES, numbers_of, row_of, same_bits

from fxprec.runtime.optim import cpp, reference
from fxprec.runtime.optim.fma import fma, sqrt
from fxprec.runtime.optim.rule import Rule

SIZES = (20_011, 0, 7, 1)


def _name(rule: Rule) -> str:
    return f"{rule.algorithm}-{rule.update}-{rule.format}"


def check_kernel(rule: Rule, run, sizes: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    """Run a kernel over parameters of all sizes at once, and the reference over each."""
    rows = [row_of(rule, n, seed) for seed, n in enumerate(sizes)]
    wanted = [[t.clone() for t in row] for row in rows]
    scalars, integers = numbers_of(rule, len(rows))
    counts = torch.zeros(len(rows), 2, dtype=torch.int64)
    assert run(rule, rows, scalars, integers, counts)
    for i, (row, expected) in enumerate(zip(rows, wanted, strict=True)):
        count = torch.zeros(2, dtype=torch.int64)
        reference.run(rule, expected, scalars[i], integers[i], count)
        for name, found, right in zip(rule.tensors, row, expected, strict=True):
            assert same_bits(found, right), (name, sizes[i])
        assert counts[i].tolist() == count.tolist()
    assert int(counts[0, 0]) > sizes[0] // 2  # updates there were


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_the_cpu_kernel_gives_the_bits_of_the_reference(rule: Rule) -> None:
    check_kernel(rule, cpp.run, SIZES)


def test_fused_multiply_add_rounds_once() -> None:
    """Against exact fractions: no float32 is nearer, and ties are even."""
    g = torch.Generator().manual_seed(0)
    a, b = ((torch.randint(1 << 23, 1 << 24, (2, 1500), generator=g)).float() * 2.0**-23).unbind()
    exponent = torch.randint(-60, 60, (1500,), generator=g)
    # Every third addend makes the sum of the leading parts a tie, which the product's tail breaks.
    c = torch.where(torch.arange(1500) % 3 == 0, 2.0**24 + 2, torch.ldexp(-(a * b).float(), exponent // 20))
    for x, y, z, found in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(x.item()) * Fraction(y.item()) + Fraction(z.item())
        error = abs(Fraction(found.item()) - exact)
        for side in (-torch.inf, torch.inf):
            other = torch.nextafter(found, torch.tensor(side))
            distance = abs(Fraction(other.item()) - exact)
            even = int(found.view(torch.int32)) % 2 == 0
            assert error < distance or (error == distance and even)
    assert torch.isnan(fma(torch.tensor([torch.inf]), torch.zeros(1), torch.ones(1))).item()


def test_square_roots_are_rounded_once() -> None:
    x = torch.rand(100_000) * 10 ** (torch.rand(100_000) * 30 - 20)
    assert np.array_equal(sqrt(x).numpy(), np.sqrt(x.numpy()))


@interpreted
@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_triton_kernels_give_the_bits_of_the_reference(rule: Rule) -> None:
    from fxprec.runtime.optim import triton_step

    with np.errstate(all="ignore"):  # the interpreter is NumPy, which warns of inf and NaN
        check_kernel(rule, triton_step.run, (3_000, 0, 7))


def test_in_the_interpreter(interpreted_tests: InterpretedTests) -> None:
    assert interpreted_tests.passed(__file__) == len(RULES)


@pytest.mark.parametrize("arch", [80, 90, *(pytest.param(arch, marks=pytest.mark.full) for arch in (89, 100))])
def test_triton_kernels_compile_for_every_architecture(arch: int) -> None:
    pytest.importorskip("triton")
    from fxprec.runtime.optim.triton_source import compile_to_ptx

    text = compile_to_ptx(RULES[5], arch)
    assert "fma.rn.f32" in text
    assert "sqrt.rn.f32" in text
    assert "div.full" not in text
