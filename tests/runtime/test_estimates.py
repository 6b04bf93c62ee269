"""The scale solver against closed forms and Monte Carlo (Zhao et al. 2020, Theorems 1 and 2)."""

from __future__ import annotations

import math
import random

import pytest
import scipy.special
import torch

from fxprec.numerics.formats import E5M2, FP16, HFP8_152, Format
from fxprec.numerics.reference import reference_stats
from fxprec.numerics.stats import Counts, finish
from fxprec.plan.scales import Cast, GradientGemm, Join, ScaleGraph
from fxprec.runtime.reference_ops import measured_moments
from fxprec.runtime.scaling.estimates import (
    LogNormal,
    Normal,
    ceil_log2,
    floor_log2,
    gemm_deviation,
    log_normal_scale,
    log_normal_underflow,
    normal_scale,
    normal_underflow,
)
from fxprec.runtime.scaling.histogram import Histogram, count_exponents
from fxprec.runtime.scaling.solver import LARGEST_CARRIED, CastStatistics, join_exp, solve
from fxprec.runtime.stats import SiteStats

FORMATS = [FP16, E5M2, HFP8_152]
SAMPLES = 400_000


def rates(x: torch.Tensor, scale_exp: int, fmt: Format) -> tuple[float, float]:
    """Measured under- and overflow, as shares of the non-zero elements."""
    stats = reference_stats(x.double() * 2.0**scale_exp, fmt)
    nonzero = int((x != 0).sum())
    return stats.underflow / nonzero, stats.overflow / nonzero


def test_closed_forms_are_those_of_the_paper() -> None:
    for s, threshold, gamma in ((1.0, 1e-3, 1e-3), (3e-7, 6e-8, 0.4), (1e-12, 2.0**-17, 1e-5)):
        scale = threshold / (math.sqrt(2) * s * scipy.special.erfinv(gamma))
        assert normal_scale(s, threshold, gamma) == pytest.approx(scale, rel=1e-9)
        assert normal_underflow(s, threshold, scale) == pytest.approx(gamma, rel=1e-9)
        mu, sigma = math.log(s), 2.5
        scale = math.exp(math.log(threshold) - mu - sigma * math.sqrt(2) * scipy.special.erfinv(2 * gamma - 1))
        assert log_normal_scale(mu, sigma, threshold, gamma) == pytest.approx(scale, rel=1e-9)
        assert log_normal_underflow(mu, sigma, threshold, scale) == pytest.approx(gamma, rel=1e-9)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("length", [16, 256, 4096, 65_536])
def test_predicted_underflow_of_gemm_products_is_what_is_measured(fmt: Format, length: int) -> None:
    """Sums of ``length`` products of normals; theirs is a normal from 16 on (drawn as such above 256: same law)."""
    generator = torch.Generator().manual_seed(length)
    s_gradient, s_operand = 3e-6, 0.04
    count = SAMPLES
    if length <= 256:
        gradient = torch.randn(count // 200, length, generator=generator, dtype=torch.float64) * s_gradient
        operand = torch.randn(length, 200, generator=generator, dtype=torch.float64) * s_operand
        x = gradient @ operand
        deviation = gemm_deviation(
            length, float(gradient.square().mean().sqrt()), float(operand.square().mean().sqrt())
        )
    else:
        deviation = gemm_deviation(length, s_gradient, s_operand)
        x = torch.randn(count, generator=generator, dtype=torch.float64) * deviation
    model, checked = Normal(deviation, fmt), 0
    for k in range(model.smallest_scale_exp(0.5) - 2, model.smallest_scale_exp(5e-3) + 1):
        predicted, (measured, _) = model.underflow(k), rates(x, k, fmt)
        if measured * count > 1600:  # four deviations of the count are 10 %
            assert predicted == pytest.approx(measured, rel=0.1)
            checked += 1
    assert checked >= 6
    assert rates(x, model.smallest_scale_exp(1e-3), fmt)[0] <= 1.2e-3


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("mu", "sigma"), [(-20.0, 1.0), (-14.0, 3.0), (-30.0, 0.3)])
def test_predicted_underflow_behind_a_softmax_is_what_is_measured(fmt: Format, mu: float, sigma: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.exp(mu + sigma * torch.randn(SAMPLES, generator=generator, dtype=torch.float64))
    moments = measured_moments(x.float())
    (found,) = finish(torch.tensor([Counts(0, 0, 0, x.numel(), *moments, 0, 0)], dtype=torch.float64))
    mean_ln, std_ln = found.mean_ln, found.std_ln
    model, checked = LogNormal(mean_ln, std_ln, fmt), 0
    for k in range(model.smallest_scale_exp(0.9), model.smallest_scale_exp(1e-3) + 1):
        predicted, (measured, _) = model.underflow(k), rates(x, k, fmt)
        if measured * SAMPLES > 1600:
            assert predicted == pytest.approx(measured, rel=0.1)
            checked += 1
    assert checked >= 1
    assert rates(x, model.smallest_scale_exp(1e-3), fmt)[0] <= 1.2e-3


@pytest.mark.parametrize("fmt", [*FORMATS, Format(4, 3, bias=4), Format(3, 0), Format(6, 9)], ids=str)
def test_histograms_give_exact_rates_at_every_scale(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5000, generator=generator) * torch.exp(3 * torch.randn(5000, generator=generator)) * 1e-6
    x[::7] = 0
    codes = torch.arange(1, 64) / 64  # on the thresholds themselves
    x = torch.cat([x, codes * fmt.smallest_subnormal, codes * fmt.largest * 1e-6, torch.tensor([math.inf, math.nan])])
    finite = x[x.isfinite()]
    counts = count_exponents(x, fmt).tolist()
    histogram = Histogram.of(counts, float(finite.abs().max()), fmt)
    for k in range(-30, 60, 3):
        under, over = rates(finite, k, fmt)
        assert histogram.underflow(k) == pytest.approx(under, abs=1e-9), k
        assert histogram.overflow(k) == pytest.approx(over, abs=1e-9), k
    for gamma in (1e-3, 0.1):
        k = histogram.smallest_scale_exp(gamma)
        assert rates(finite, k, fmt)[0] <= gamma < rates(finite, k - 1, fmt)[0]


def test_more_elements_are_counted_than_float32_counts_to() -> None:
    elements = (1 << 24) + 8
    assert count_exponents(torch.ones(elements), FORMATS[0]).view(2, -1).sum(1).tolist() == [elements] * 2


def test_joins_take_the_largest_scale_that_fits_all_and_their_sum() -> None:
    assert join_exp([3, 7, 5], [1.0, 1.0, 1.0], 2.0**20) == 7
    assert join_exp([3, 18, 19], [1.0, 1.0], 2.0**20) == 18
    assert join_exp([3, 19, 19], [1.0, 1.0], 2.0**20) == 3, "2**19 + 2**19 is not below"
    assert join_exp([30, 40], [1.0, 0.5], 2.0**20) == 19, "none fits: the largest power of two that does"
    assert join_exp([4, 2], [], 2.0**20) == 4
    pick = random.Random(0)
    for _ in range(300):
        exps = [pick.randint(-40, 40) for _ in range(3)]
        amaxes = [2.0 ** pick.uniform(-40, 40) for _ in range(3)]
        found = join_exp(exps, amaxes, 65504.0)
        assert math.ldexp(math.fsum(amaxes), found) < 65504.0
        better = [e for e in exps if math.ldexp(math.fsum(amaxes), e) < 65504.0]
        assert found == max(better) if better else math.ldexp(math.fsum(amaxes), found + 1) >= 65504.0


def stats(row: int, rms: float, amax: float) -> SiteStats:
    return SiteStats(row, 0.0, 0.0, amax, rms=rms, nonzero_ratio=1.0, mean_ln=math.log(rms), std_ln=1.0)


def solved(graph: ScaleGraph, *rows: SiteStats) -> list[int]:
    by_row = {s.site: s for s in rows}
    measured = CastStatistics(by_row, {r: s.amax for r, s in by_row.items()}, {}, frozenset(by_row))
    return solve(graph, measured, 1e-3, {}, [0] * len(graph.variables)).exps


def test_a_graph_is_solved_in_one_walk() -> None:
    first = Cast(0, 0, "fp16_sat", None, "softmax")
    second = Cast(1, 1, "fp16_sat", 0, "gemm", GradientGemm(length=64, gradient=0, operand=5))
    graph = ScaleGraph((first, second, Join((0, 1)), Cast(2, 2, "fp16_sat", 2)))
    exps = solved(graph, stats(0, 1e-9, 1e-8), stats(1, 1e-3, 1e-2), stats(5, 0.1, 0.5))
    assert exps[0] == ceil_log2(log_normal_scale(math.log(1e-9), 1.0, 2.0**-25, 1e-3)) + 2
    s = 8 * 1e-9 * 0.1
    assert exps[1] <= 16 - 3 - floor_log2(1e-2), "Lemma 1, unless what is seen would overflow"
    assert exps[1] == min(ceil_log2(normal_scale(s, 2.0**-25, 1e-3)) + 2, max(
        floor_log2(65504) - 1 - 3 - floor_log2(1e-2), floor_log2(65504 / (64 * 1e-8 * 0.5))
    ))  # fmt: skip
    assert exps[2] == max(exps[:2])
    assert exps[3] == exps[2], "nothing known of it: it inherits"
    assert LARGEST_CARRIED > 2.0**60


def test_no_drift_however_often_it_is_solved() -> None:
    graph = ScaleGraph((Cast(0, 0, "1-5-2", None),))
    found = {tuple(solved(graph, stats(0, 1e-5, 1e-4))) for _ in range(100)}
    assert len(found) == 1
    assert all(isinstance(e, int) for e in next(iter(found)))
