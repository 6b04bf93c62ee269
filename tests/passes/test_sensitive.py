"""What 8 bits would spoil: that they would, what the format it is stored in instead costs, and that it is stored so.

Gradients are by the operator's own backward formula, once from the exact saved value in float64 and once from the
rounded one; errors are relative, in the Euclidean norm. Inputs are those that matter: flat and peaked, saturated, wide.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from models import Apply
from one_pass import run_pass
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxprec.ir.operators import models
from fxprec.passes.analysis import sensitive
from fxprec.plan import Site
from tests.helpers import compiled, eager_backend

aten = torch.ops.aten


def normal(*shape: int, by: float = 1.0) -> Tensor:
    torch.manual_seed(0)
    return by * torch.randn(*shape, dtype=torch.float64)


def near_1(limit: float) -> Tensor:
    torch.manual_seed(0)
    return limit * (2 * torch.rand(10_000, dtype=torch.float64) - 1)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max  # torch 2.11 casts what is larger to NaN
    return x.clamp(-limit, limit).to(dtype).double()


def error(gradient: Callable[[Tensor], Tensor], saved: Tensor, dtype: torch.dtype) -> float:
    """How far the gradient is off where the saved value has been rounded."""
    exact = gradient(saved)
    return float((gradient(rounded(saved, dtype)) - exact).norm() / exact.norm())


@dataclass(frozen=True)
class Case:
    """A value saved for backward, and the gradient made of it."""

    saved: Tensor
    gradient: Callable[[Tensor], Tensor]
    in_8_bits: float
    """The error is at least this in e4m3fn,"""
    as_stored: float
    """and at most this in the format the table gives it: bfloat16, or its own."""


def incoming(shape: torch.Size) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def softmax(by: float, in_8_bits: float) -> Case:
    g = incoming(torch.Size((64, 1024)))
    backward = lambda y: aten._softmax_backward_data(g, y, -1, torch.float64)  # noqa: E731
    return Case(normal(64, 1024, by=by).softmax(-1), backward, in_8_bits, 2**-8)


def pointwise(backward: Callable[[Tensor], Tensor], saved: Tensor, in_8_bits: float, as_stored: float) -> Case:
    g = incoming(saved.shape)
    return Case(saved, lambda x: g * backward(x), in_8_bits, as_stored)


def grid_sampled(dimensions: int, in_8_bits: float, as_stored: float) -> Case:
    """The gradient of the image: where a position is off, it goes to another pixel."""
    sizes = (1, 1, *([256, 256] if dimensions == 2 else [16, 16, 16]))
    grid = near_1(1.0)[: 3000 * dimensions].view(1, 3000, *[1] * (dimensions - 1), dimensions)
    g = incoming(torch.Size((1, 1, *grid.shape[1:-1])))

    def backward(grid: Tensor) -> Tensor:
        image = torch.zeros(sizes, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(nn.functional.grid_sample(image, grid, align_corners=False), image, g)[0]

    return Case(grid, backward, in_8_bits, as_stored)


SATURATED = near_1(1.0).sign() * (1 - 2**-5 * torch.rand(10_000, generator=torch.Generator().manual_seed(2)).double())
OPAQUE = (normal(64, 16).abs() + 0.5).index_fill(1, torch.tensor([2]), 1e-5)
NEAR_0 = normal(10_000).square() + 1e-8
CASES = {
    ("aten._softmax", "flat"): softmax(0.1, 0.9),
    ("aten._softmax", "peaked"): softmax(10.0, 0.03),
    ("aten._safe_softmax", "ordinary"): softmax(1.0, 0.3),
    ("aten.tanh", "saturated"): pointwise(lambda y: 1 - y * y, SATURATED, 0.5, 0.1),
    ("aten.tanh", "wide"): pointwise(lambda y: 1 - y * y, normal(10_000, by=3).tanh(), 0.05, 0.005),
    ("aten.sigmoid", "saturated"): pointwise(lambda y: y * (1 - y), SATURATED.abs(), 0.5, 0.1),
    ("aten.sigmoid", "wide"): pointwise(lambda y: y * (1 - y), normal(10_000, by=3).sigmoid(), 0.05, 0.005),
    ("aten.exp", "wide"): pointwise(lambda y: y, normal(10_000, by=3).exp(), 0.9, 2**-8),
    ("aten.expm1", "saturated"): pointwise(lambda y: y + 1, -SATURATED.abs(), 0.5, 0.1),
    ("aten.cumprod", "after a factor of 1e-5"): pointwise(
        lambda y: y.flip(-1).cumsum(-1).flip(-1) / OPAQUE, OPAQUE.cumprod(-1), 0.8, 2**-8
    ),
    ("aten.rsqrt", "of a square near 0"): pointwise(lambda y: y**3, NEAR_0.rsqrt(), 0.9, 0.01),
    ("aten.reciprocal", "near 0"): pointwise(lambda y: y * y, NEAR_0.sqrt().reciprocal(), 0.1, 0.01),
    ("aten.logcumsumexp", "wide"): pointwise(
        lambda y: (normal(64, 1024, by=5) - y).exp(), normal(64, 1024, by=5).logcumsumexp(-1), 0.3, 0.05
    ),
    ("aten.grid_sampler_2d", "half of 256 pixels"): grid_sampled(2, 0.5, 1e-4),
    ("aten.grid_sampler_3d", "half of 16 voxels"): grid_sampled(3, 0.05, 1e-4),
    ("aten.erfinv", "near 1"): pointwise(lambda x: x.erfinv().square().exp(), near_1(0.999), torch.inf, 1e-4),
    ("aten.sin", "angles to 90"): pointwise(torch.cos, normal(10_000, by=30), 0.7, 0.06),
    ("aten.cos", "angles to 90"): pointwise(lambda x: -torch.sin(x), normal(10_000, by=30), 0.6, 0.06),
    ("aten.asin", "near 1"): pointwise(lambda x: (1 - x * x).rsqrt(), near_1(0.999), torch.inf, 1e-5),
    ("aten.acos", "near 1"): pointwise(lambda x: -(1 - x * x).rsqrt(), near_1(0.999), torch.inf, 1e-5),
    ("aten.atanh", "near 1"): pointwise(lambda x: 1 / (1 - x * x), near_1(0.999), torch.inf, 1e-5),
    ("aten.sinh", "wide"): pointwise(torch.cosh, normal(10_000, by=6), 0.4, 0.03),
    ("aten.cosh", "wide"): pointwise(torch.sinh, normal(10_000, by=6), 0.4, 0.03),
    ("exponentiated", "logsumexp"): pointwise(
        lambda x: (x - normal(64, 1024, by=5).logsumexp(-1, True)).exp(), normal(64, 1024, by=5), 0.5, 0.05
    ),
}
TABLES = {
    name: kept
    for one in models.BY_HAND
    for name in (f"aten.{short.removesuffix('.*')}" for short in one.names.split())
    if (kept := one.spec.result or one.spec.operands) is not None
}


def stored_dtype(name: str) -> torch.dtype:
    entry = TABLES.get(name)
    return torch.float32 if entry is not None and entry.as_it_is else torch.bfloat16


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case))
def test_8_bits_would_spoil_the_gradient_and_what_is_stored_does_not(case) -> None:
    given = CASES[case]
    assert error(given.gradient, given.saved, torch.float8_e4m3fn) >= given.in_8_bits
    assert error(given.gradient, given.saved, stored_dtype(case[0])) <= given.as_stored


def test_every_entry_of_the_tables_is_measured() -> None:
    assert {name for name, _ in CASES} == TABLES.keys() | {"exponentiated"}


def test_the_numbers_in_the_reasons() -> None:
    """A reason names the rounding that does the harm: each is e4m3fn's."""
    e4m3fn = functools.partial(rounded, dtype=torch.float8_e4m3fn)
    assert e4m3fn(torch.tensor([2**-10, 1.01 * 2**-10])).tolist() == [0, 2**-9], "below 2^-10 it is 0"
    probabilities = normal(64, 1024).softmax(-1)
    assert (e4m3fn(probabilities) == 0).double().mean() > 0.6, "over 1,000 keys most are"
    near = torch.linspace(0.5, 1, 10_001, dtype=torch.float64)
    assert (e4m3fn(near) - near).abs().max() == 2**-5
    angles = torch.linspace(16, 32, 10_001, dtype=torch.float64)
    assert (e4m3fn(angles) - angles).abs().max() == 1
    assert e4m3fn(torch.tensor(1.99)) == 2
    assert round(torch.tensor(0.5).exp().item(), 1) == 1.6


def test_the_error_of_a_statistic_does_not_cancel() -> None:
    """Of a factor of 1,024 numbers the one error is that of their sum; errors of the numbers themselves cancel."""
    e4m3fn = functools.partial(rounded, dtype=torch.float8_e4m3fn)
    x, factor = normal(1024).abs(), torch.tensor(1.06, dtype=torch.float64)
    exact = (x * factor).sum()
    assert ((x * e4m3fn(factor)).sum() - exact).abs() > 0.05 * exact
    assert ((e4m3fn(x) * factor).sum() - exact).abs() < 0.005 * exact


@pytest.mark.parametrize(("by", "in_8_bits", "as_stored"), [(1.0, 0.03, 0.001), (3.0, 0.3, 0.001)])
def test_attention_with_large_logits(by: float, in_8_bits: float, as_stored: float) -> None:
    """q and k in 8 bits make rows that add up to anything; v and the result in 8 bits do no such harm.

    What is multiplied in forward is q and k in bfloat16, so that backward finds the sums it divides by.
    """
    q, k, v = (rounded(normal(3, 4, 256, 64, by=b), torch.bfloat16)[i] for i, b in enumerate((by, by, 1.0)))
    g = normal(4, 256, 64)
    scores = lambda q, k: q @ k.mT / 8  # noqa: E731
    sums = scores(q, k).logsumexp(-1, keepdim=True)
    result = (scores(q, k) - sums).exp() @ v

    def gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (scores(q, k) - sums).exp()
        inner = p * (g @ v.mT - (g * result).sum(-1, keepdim=True))
        return torch.cat([inner @ k / 8, inner.mT @ q / 8, p.mT @ g], -1)

    low = functools.partial(rounded, dtype=torch.float8_e4m3fn)
    exact = gradient(q, k, v)
    off = lambda found: float((found - exact).norm() / exact.norm())  # noqa: E731
    rows = (scores(low(q), low(k)) - sums).exp().sum(-1)
    assert off(gradient(low(q), low(k), v)) > in_8_bits
    assert (rows - 1).abs().max() > (1 if by > 1 else 0.02), "they should add up to 1"
    assert off(gradient(q, k, rounded(v, torch.bfloat16))) <= as_stored
    assert off(gradient(q, k, low(v))) < in_8_bits, "v is linear: it may be low"


class Sensitive(nn.Module):
    """Each operator of the tables on a tensor of its own, and what has no table: attention, exponents, a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(self.enter(x))
        parts = [
            getattr(torch, name)(h * (2 + i) + 1)  # of a multiple alone, backward would recompute a tanh or a sigmoid
            for i, name in enumerate(("tanh", "sigmoid", "exp", "expm1", "sin", "cos"))
        ]
        parts += [
            getattr(torch, name)(h * (0.1 + i / 100)) for i, name in enumerate(("asin", "acos", "atanh", "erfinv"))
        ]
        parts += [getattr(torch, name)(h * (0.5 + i)) for i, name in enumerate(("sinh", "cosh"))]
        q, k, v = (h * 3, h.sin(), h)
        with sdpa_kernel(SDPBackend.MATH):  # what torch 2.13 takes for three dimensions, but not 2.14
            parts += [(h * 9).softmax(-1), nn.functional.scaled_dot_product_attention(q, k, v)]
        image, flat = torch.arange(512.0).sin().view(8, 64), h.tanh()
        parts.append((h * 6).logcumsumexp(-1))
        plane = nn.functional.grid_sample(image[None, None], flat.view(1, 32, 16, 2), align_corners=False)
        space = nn.functional.grid_sample(
            image.view(1, 1, 8, 8, 8), h.cos()[..., :15].reshape(1, 2, 32, 5, 3), align_corners=False
        )
        most = torch.stack([(h * 7).amax(-1), (h * 8).logsumexp(-1)], -1)
        return torch.stack(parts).square().mean(0), most, plane, space


class Inverses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.enter(x)
        parts = [(h * 2 - 1).cumprod(-1), (h * h + 2).rsqrt(), (h * h + 3).reciprocal()]
        return (torch.stack(parts).square(),)


@pytest.fixture(scope="module")
def sites() -> tuple[Site, ...]:
    """Those of both models."""
    torch.manual_seed(0)
    backends = [eager_backend("fp8", low_ratio=1.0) for _ in range(2)]
    for model, backend in zip((Sensitive(), Inverses()), backends, strict=True):
        torch.stack([out.sum() for out in compiled(model, backend)(torch.randn(2, 32, 16))]).sum().backward()
    return tuple(site for backend in backends for site in backend.plans[0].sites)


def sites_because(sites: tuple[Site, ...], reason: str) -> list[str]:
    return [site.format for site in sites if reason in site.why]


@pytest.mark.parametrize("name", TABLES)
def test_an_entry_is_stored_as_the_table_says(sites: tuple[Site, ...], name: str) -> None:
    formats = sites_because(sites, f"({name})")
    assert formats
    assert set(formats) == {"fp32" if stored_dtype(name) == torch.float32 else "bf16"}


def test_exponents_and_what_is_compared_are_kept_without_a_table(sites: tuple[Site, ...]) -> None:
    assert set(sites_because(sites, sensitive.EXPONENTIATED.why)) == {"bf16"}
    assert set(sites_because(sites, sensitive.COMPARED.why)) == {"fp32"}


MAXIMA: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda h: h.amax(-1),
    "max": lambda h: h.max(),
    "norm": lambda h: torch.linalg.vector_norm(h, ord=torch.inf, dim=-1),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_the_gradient_of_a_maximum_finds_where_it_stood(name: str) -> None:
    layer, x = nn.Linear(8, 16), torch.randn(4, 8)
    (exact,) = torch.autograd.grad(MAXIMA[name](layer(x)).sum(), layer.weight)
    step = compiled(lambda x: MAXIMA[name](layer(x)).sum(), eager_backend("fp8", low_ratio=1.0))
    (got,) = torch.autograd.grad(step(x), layer.weight)
    assert (got - exact).norm() <= 0.05 * exact.norm(), "that of the input in 8 bits"


def test_a_value_that_must_be_high_is_not_made_again_from_a_low_copy() -> None:
    def model(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = (x @ w).relu()
        return (h * 30).cos() + h @ v

    w, v = torch.randn(8, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    sites = {s.tensor: s for s in run_pass("write-plan", model, torch.randn(32, 8), w, v).work.plan.sites}
    assert (sites["relu"].format, sites["relu"].reads) == ("e4m3fn", "backward")
    assert (sites["mul"].format, sites["mul"].reads) == ("bf16", "backward")


@pytest.mark.parametrize("peak", [None, "100%"])
def test_a_value_that_16_bits_spoil_is_not_computed_again_from_copies_of_16(peak: str | None) -> None:
    """Half of the gradients were NaN: the quotient, computed again from a copy in bf16, was above 1."""

    def angle(x: Tensor, by: Tensor, side: Tensor) -> Tensor:
        z = x * by
        return torch.acos(z / (torch.sqrt(z**2 + side**2) + 1e-5))

    x, by = (torch.rand(256, 16, generator=torch.Generator().manual_seed(seed)) + 0.5 for seed in (0, 1))
    side = (torch.rand(256, 16, generator=torch.Generator().manual_seed(2)) * 0.02 + 1e-4).requires_grad_()
    (exact,) = torch.autograd.grad(angle(x, by, side).sum(), side)
    step = compiled(angle, eager_backend(recipe="bf16", low_ratio=None, peak_budget=peak))
    (got,) = torch.autograd.grad(step(x.requires_grad_(), by, side).sum(), side)
    assert (got - exact).norm() <= 2**-7 * exact.norm()


def test_of_two_reasons_the_more_careful_counts() -> None:
    """Arcsine's operand keeps its own dtype, and sine's is stored in bf16: here it is the same."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).tanh() * 0.99
        return torch.stack([h.asin(), h.sin()])

    w = torch.randn(8, 64, requires_grad=True)
    sites = run_pass("write-plan", model, torch.randn(32, 8), w).work.plan.sites
    assert sites_because(sites, "(aten.asin)") == ["fp32"]
    assert sites_because(sites, "(aten.sin)") == []


def test_an_operator_that_no_table_knows_is_named_in_the_notes() -> None:
    prod = Apply(lambda x: x.prod(-1))
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.GELU(), prod), torch.randn(5, 4)
    plan = run_pass("write-plan", model, x).work.plan
    (note,) = plan.notes
    assert re.fullmatch(
        r"aten\.prod \(prod, 4, test_sensitive\.py:\d+\): its backward reads saved values in their own dtype, since no "
        r"measurement shows how rounding would affect its gradient",
        note,
    )
    assert set(sites_because(plan.sites, f"{sensitive.UNKNOWN.why} (aten.prod)")) == {"fp32"}
    high = run_pass("write-plan", model, x, low_ratio=0.0).work.plan
    assert high.notes == plan.notes, "nor is it in bf16"
    assert run_pass("write-plan", model, x, storage="simulate").work.plan.notes == ()
