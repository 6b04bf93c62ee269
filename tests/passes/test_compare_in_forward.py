"""Pass compare-in-forward: two tensors are compared on their values, in forward, and not on the copies stored of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import compiled, eager_backend
from models import Parts
from one_pass import run_pass
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten
NAME = "compare-in-forward"
pytestmark = pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "clamp": lambda a, b: a.clamp(b * 0.984375, b),
}


def operands() -> tuple[Tensor, Tensor]:
    """Two tensors closer to each other than numbers of e4m3fn are; of bfloat16, in which a checkpointed region starts."""
    torch.manual_seed(0)
    a = torch.randn(32, 16) + 4
    b = a * (1 + 0.02 * torch.randn(32, 16))
    return a.bfloat16().float().requires_grad_(), b.bfloat16().float().requires_grad_()


def test_a_maximums_comparisons_are_forwards_once_each() -> None:
    ran = run_pass(NAME, torch.maximum, *operands(), recipe="fp8")
    assert [ran.halves(target) for target in (aten.eq.Tensor, aten.lt.Tensor, aten.gt.Tensor)] == [(1, 0)] * 3
    assert len(ran.before.find_nodes(op="call_function", target=aten.eq.Tensor)) == 2


@pytest.mark.parametrize(
    "model",
    [
        lambda a, b: (a @ b.t()).amax(-1),  # where it stood: its operand keeps its own dtype
        lambda a, b: torch.where(a < b, a * a, b),  # forward's own
    ],
    ids=["for equality alone", "in forward"],
)
def test_other_comparisons_stay(model: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert run_pass(NAME, model, *operands(), recipe="fp8").is_unchanged()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_gradient_goes_where_the_values_say(name: str, recompute: bool) -> None:
    """Found by ParityBench (losses of boxes): with copies in 8 bits half of the operands were equal."""
    a, b = operands()
    weights = torch.randn(32, 16)

    def model(a: Tensor, b: Tensor) -> Tensor:
        run = lambda a, b: OPERATORS[name](a, b).sin()  # noqa: E731
        return (checkpoint(run, a, b, use_reentrant=False) if recompute else run(a, b)) * weights

    exact = torch.autograd.grad(model(a, b).sum(), (a, b))
    step = compiled(model, eager_backend(recipe="fp8", low_ratio=1.0))
    found = torch.autograd.grad(step(a, b).sum(), (a, b))
    for got, wanted in zip(found, exact, strict=True):
        assert torch.equal(got == 0, wanted == 0), "who gets none"
        assert (got - wanted).norm() < 0.1 * wanted.norm()


def test_a_maximum_saves_comparisons_in_the_place_of_copies() -> None:
    layers = {"one": nn.Linear(16, 64), "other": nn.Linear(16, 64)}
    maxout = Parts(lambda m, x: torch.maximum(m.one(x), m.other(x)), **layers)
    backend = eager_backend(recipe="fp8", low_ratio=1.0)
    compiled(maxout, backend)(torch.randn(32, 16)).sum().backward()
    saved = {site.tensor for site in backend.plans[0].sites if site.direction == "forward" and site.reads == "backward"}
    assert "addmm" not in saved
    assert "addmm_1" not in saved
    assert backend.plans[0].saved_bytes.planned == 3 * 32 * 64 // 8 + 32 * 16  # masks, and the input in 8 bits
