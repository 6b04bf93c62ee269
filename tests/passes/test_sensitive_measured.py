"""Operators that no row by hand names: what is measured of them decides, and it does no more harm than 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxprec.passes.analysis import sensitive
from tests.helpers import compiled, eager_backend

HARMLESS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "replication_pad1d": (lambda h: nn.functional.pad(h, (2, 1), mode="replicate"), (2, 4, 8)),
    "replication_pad2d": (lambda h: nn.functional.pad(h, (2, 1, 1, 1), mode="replicate"), (2, 4, 8, 8)),
    "replication_pad3d": (lambda h: nn.functional.pad(h, (1,) * 6, mode="replicate"), (2, 4, 4, 4, 4)),
    "adaptive_max_pool3d": (lambda h: nn.functional.adaptive_max_pool3d(h, 2), (2, 4, 4, 4, 4)),
    "linalg_cross": (lambda h: torch.linalg.cross(h, h.roll(1, 0)), (64, 3)),
    "_trilinear": (lambda h: nn.functional.bilinear(h, h.roll(1, 0), torch.ones(2, 8, 8).tril()), (64, 8)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_an_operator_that_bears_8_bits_is_known(name: str) -> None:
    """Its backward reads its input's shape or indices alone, or multiplies by what it reads."""
    function, shape = HARMLESS[name]
    assert f"aten.{name}" in sensitive.HARMLESS
    step = lambda x: function(x * 1.5)  # noqa: E731
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
    g = torch.randn(step(x).shape, generator=torch.Generator().manual_seed(4))
    (exact,) = torch.autograd.grad(step(x), x, g)
    backend = eager_backend("fp8", low_ratio=1.0)
    (found,) = torch.autograd.grad(compiled(step, backend)(x), x, g)
    assert (found - exact).norm() <= 2**-4 * exact.norm(), "the largest error of one rounding"
    assert backend.plans[0].notes == ()
    assert all(site.format == "e4m3fn" or site.unread for site in backend.plans[0].sites)


special = torch.special
BETWEEN_POLES = -3.001 + 7 * torch.rand(4096, generator=torch.Generator().manual_seed(3))
INSIDE = 2 * torch.rand(4096, generator=torch.Generator().manual_seed(3)) - 1
WIDE = 6 * torch.randn(4096, generator=torch.Generator().manual_seed(3))
NOT_BY_HAND: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "lgamma": (torch.lgamma, BETWEEN_POLES),
    "digamma": (torch.digamma, BETWEEN_POLES),
    "polygamma_1": (lambda x: torch.polygamma(1, x), BETWEEN_POLES),
    "polygamma_3": (lambda x: torch.polygamma(3, x), BETWEEN_POLES),
    "mvlgamma": (lambda x: torch.mvlgamma(x.abs() + 1.001, 3), WIDE),
    "log_ndtr": (special.log_ndtr, WIDE),
    "ndtri": (special.ndtri, INSIDE.abs()),
    "erfcx": (special.erfcx, WIDE.abs()),
    "i0e": (special.i0e, WIDE),
    "i1": (special.i1, WIDE),
    "i1e": (special.i1e, WIDE),
    "entr": (special.entr, WIDE.abs()),
    "xlog1py": (lambda x: special.xlog1py(x, x.abs()), WIDE),
    "zeta": (lambda x: special.zeta(torch.tensor(2.5), x), WIDE.abs() + 1),
    "sinc": (torch.sinc, WIDE),
    "logit": (torch.logit, INSIDE.abs()),
    "log1p": (torch.log1p, 0.9999 * INSIDE),
    "expm1": (torch.expm1, WIDE),
    "exp2": (torch.exp2, WIDE),
    "acosh": (torch.acosh, 1 + INSIDE.abs()),
    "erfinv": (torch.erfinv, 0.9999 * INSIDE),
    "atanh": (torch.atanh, 0.9999 * INSIDE),
    "acos": (torch.acos, 0.9999 * INSIDE),
    "logaddexp": (lambda x: torch.logaddexp(x, -x), WIDE),
    "cumprod": (lambda x: x.view(-1, 8).cumprod(-1), INSIDE),
    "prod": (lambda x: x.view(-1, 8).prod(-1), INSIDE),
    "pow": (lambda x: x.abs().pow(x), INSIDE),
    "binary_cross_entropy": (
        lambda x: nn.functional.binary_cross_entropy(x, torch.full_like(x, 0.5), reduction="none"),
        INSIDE.abs(),
    ),
}
SPOILED = {"lgamma", "digamma", "polygamma_1", "log_ndtr"}  # measured: 16 bits spoil what their backward reads


MEASURED_TO_BEAR_8_BITS = {"i1e"}  # over its whole domain


def in_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float() if x.dtype == torch.float32 else x


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("name", NOT_BY_HAND)
def test_what_no_row_by_hand_says_does_no_more_harm_than_in_bf16(name: str, recipe: str) -> None:
    function, given = NOT_BY_HAND[name]
    step = lambda x: function(x * 1.5)  # noqa: E731
    x = (given / 1.5).requires_grad_()
    g = torch.randn(step(x).shape, generator=torch.Generator().manual_seed(4))
    (exact,) = torch.autograd.grad(step(wide := x.detach().double().requires_grad_()), wide, g.double())
    with torch.autograd.graph.saved_tensors_hooks(in_bf16, lambda saved: saved):
        (rounded_,) = torch.autograd.grad(step(x), x, g)
    backend = eager_backend(recipe, low_ratio=1.0 if recipe == "fp8" else None)
    (found,) = torch.autograd.grad(compiled(step, backend)(x), x, g)
    off = lambda got: float((got.double() - exact).norm() / exact.norm())  # noqa: E731
    bound = 2**-4 if name in MEASURED_TO_BEAR_8_BITS and recipe == "fp8" else max(1.01 * off(rounded_), 1e-5)
    assert off(found) <= bound or not rounded_.isfinite().all()
    assert found.isfinite().all()
    if name in SPOILED:
        (plain,) = torch.autograd.grad(step(x), x, g)
        assert torch.allclose(found, plain, rtol=1e-5)
        assert any("changes its gradient" in site.why for site in backend.plans[0].sites)
