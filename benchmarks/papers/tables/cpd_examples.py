"""Han et al. 2020, Figure 4, Figure 12 and section 5: what CPD's arithmetic does, for every number instead of one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from benchmarks.papers.claims import Claim, Verdict, exactly
from benchmarks.papers.found import Found, Row
from fxprec import arith, decode, quantize
from fxprec.numerics.formats import parse

TITLE = "Scales by powers of two, a dot product in 3 bits, and sums that swallow"
SOURCE = "Figures 4 and 12, section 5.1"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = ""
DEVIATES = (
    "The paper's figures show one number and one pair of vectors, which the text does not give. Here all numbers "
    "and all pairs are taken. 1-2-0 has the numbers 0, 1, 2 and 4, and saturates. 1-5-2 is the family without "
    "inf. With the 2 mantissa bits of 1-5-2 neither remedy reaches the sum of 4,096 ones: Kahan's compensation "
    "stalls as the sum does, only later."
)
SEEDS = 1
COUNT, CHUNK = 4096, 64
ONES, RANDOM = "sum of 4,096 ones", "4,096 random products: error, %"


def run(seed: int, full: bool) -> Iterator[Row]:
    """Scaling, then the dot product, then sums."""
    for factor in (8, 10):
        changed, count = scaled(factor)
        yield f"1-5-2 times {factor}, and back", {"cases": count, "changed": changed}
    differing, wrong, count = dot_products()
    yield "1-2-0 dot products", {"cases": count, "changed": differing, "wrong": wrong}
    for name in ("1-5-2", "1-6-9", "bf16"):
        for how, options in (("", {}), (", Kahan", {"kahan": True}), (f", chunks of {CHUNK}", {"chunk": CHUNK})):
            yield (
                f"{name}{how}",
                {ONES: float(arith.sum(torch.ones(COUNT), name, **options)), RANDOM: error(name, options)},
            )


def scaled(factor: int) -> tuple[int, int]:
    """How many positive normal 1-5-2 numbers whose multiple is in range come back changed, and how many there are."""
    fmt = parse("1-5-2")
    x = decode(torch.arange(4, 128, dtype=torch.uint8), fmt)  # codes below 4 are zero and subnormal
    x = x[x * factor <= fmt.largest]
    back = quantize(quantize(x * factor, fmt) / factor, fmt)
    return int((back != x).sum()), len(x)


def dot_products() -> tuple[int, int, int]:
    """Pairs of vectors of three 1-2-0 numbers: where rounding only the result differs, where ours is wrong, all."""
    numbers = (0, 1, 2, 4, -1, -2, -4)
    vectors = torch.tensor(list(product(numbers, repeat=3)), dtype=torch.float32)
    ours = arith.matmul(vectors, vectors.T, "1-2-0")
    only_result = quantize(vectors @ vectors.T, "1-2-0")
    return int((ours != only_result).sum()), int((ours != by_hand(vectors)).sum()), ours.numel()


def by_hand(vectors: Tensor) -> Tensor:
    """All dot products from the definition: each product and each sum to the nearest of 0, 1, 2, 4, ties to even."""
    nearest = torch.tensor([0, 1, 2, 2, *[4] * 29])  # 3 is a tie between 2, code 2, and 4, code 3

    def rounded(x: Tensor) -> Tensor:
        return nearest[x.abs()] * x.sign()

    whole, total = vectors.long(), torch.zeros(len(vectors), len(vectors), dtype=torch.int64)
    for k in range(whole.shape[1]):
        total = rounded(total + rounded(whole[:, None, k] * whole[None, :, k]))
    return total.float()


def error(name: str, options: dict) -> float:
    """Relative error in percent of a dot product of uniform numbers of the format."""
    g = torch.Generator().manual_seed(0)
    a, b = (quantize(torch.rand(COUNT, generator=g), name) for _ in range(2))
    exact = float(a.double() @ b.double())
    return 100 * abs(float(arith.dot(a, b, name, **options)) - exact) / exact


def _powers_of_two(found: Found) -> Verdict:
    by8, by10 = (found.mean(f"1-5-2 times {f}, and back", "changed") for f in (8, 10))
    return exactly(by8 == 0 < by10, f"{by8:.0f} and {by10:.0f} numbers changed")


def _step_by_step(found: Found) -> Verdict:
    wrong, differing = (found.mean("1-2-0 dot products", c) for c in ("wrong", "changed"))
    return exactly(wrong == 0 < differing, f"{wrong:.0f} wrong; {differing:,.0f} differ from rounding only the result")


def _recovered(found: Found) -> Verdict:
    ours = [found.mean(f"{n}{how}", ONES) for n in ("1-6-9", "bf16") for how in (", Kahan", f", chunks of {CHUNK}")]
    plain = [found.mean(n, ONES) for n in ("1-6-9", "bf16")]
    stuck = ", ".join(f"{v:.0f}" for v in plain)
    return exactly(all(v == COUNT for v in ours) and max(plain) < COUNT, f"plain sums stop at {stuck}")


def _closer(found: Found) -> Verdict:
    ratios = []
    for name in ("1-5-2", "1-6-9", "bf16"):
        plain = found.mean(name, RANDOM)
        ratios.extend(found.mean(f"{name}{how}", RANDOM) / plain for how in (", Kahan", f", chunks of {CHUNK}"))
    return exactly(max(ratios) < 1, f"the largest is {max(ratios):.3f} of the plain sum's")


CLAIMS = [
    Claim("a number that is multiplied and divided by 8 is unchanged, by 10 it is not (Figure 4)", _powers_of_two),
    Claim(
        "rounding every product and sum gives CPD's bits, and rounding the result alone does not (Figure 12)",
        _step_by_step,
    ),
    Claim(
        "Kahan summation, or a sum in chunks, keeps the small addends that a narrow accumulator swallows", _recovered
    ),
    Claim("on random numbers both have a smaller error than the plain sum, in every format", _closer),
]
