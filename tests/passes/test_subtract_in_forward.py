"""Pass subtract-in-forward: backward reads forward's difference of two values, and not that of their stored copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend
from one_pass import run_pass
from torch import Tensor
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten
NAME = "subtract-in-forward"
pytestmark = pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "a sum of squares": lambda a, b: (a - b).square().sum(),
}


def operands(apart: float = 0.02) -> tuple[Tensor, Tensor]:
    """A prediction near its target; both are numbers of bfloat16, in which a checkpointed region starts."""
    torch.manual_seed(0)
    target = torch.rand(32, 16) + 8
    prediction = target * (1 + apart * torch.randn(32, 16))
    return prediction.bfloat16().float().requires_grad_(), target.bfloat16().float().requires_grad_()


def test_backward_reads_forwards_difference() -> None:
    prediction, target = operands()
    ran = run_pass(NAME, F.mse_loss, prediction, target.detach(), recipe="fp8")
    assert len(ran.before.find_nodes(op="call_function", target=aten.sub.Tensor)) == 2
    assert ran.halves(aten.sub.Tensor) == (1, 0)
    assert ran.halves(aten.neg.default) == (0, 0)


@pytest.mark.parametrize(
    "model",
    [
        lambda a, b: F.layer_norm(a @ b.t(), (32,)),  # less a mean: store-centred looks at the copy's readers
        lambda a, b: (a - b).sin(),  # forward's own
        lambda a, b: (a @ b.t()).sigmoid(),  # 1 - y
    ],
    ids=["from a mean", "in forward", "from a number"],
)
def test_other_differences_stay(model: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert run_pass(NAME, model, *operands(), recipe="fp8").is_unchanged()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_small_error_is_right(name: str, recompute: bool) -> None:
    """Found beside ParityBench (JointsMSELoss): the difference of two 8-bit copies was several times too large."""
    prediction, target = operands()

    def model(a: Tensor, b: Tensor) -> Tensor:
        run = lambda a, b: LOSSES[name](a, b)  # noqa: E731
        return checkpoint(run, a, b, use_reentrant=False) if recompute else run(a, b)

    exact = torch.autograd.grad(model(prediction, target), (prediction, target))
    step = compiled(model, eager_backend(recipe="fp8", low_ratio=1.0))
    found = torch.autograd.grad(step(prediction, target), (prediction, target))
    for got, wanted in zip(found, exact, strict=True):
        assert (got - wanted).norm() < 0.1 * wanted.norm()


def test_a_loss_saves_one_copy() -> None:
    prediction, target = operands()
    backend = eager_backend(recipe="fp8", low_ratio=1.0)
    step = compiled(lambda a, b: F.mse_loss(a, b), backend)
    step(prediction, target.detach()).backward()
    assert backend.plans[0].saved_bytes.planned == 32 * 16
