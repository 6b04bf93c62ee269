"""What backward reads of a parameter is read before the parameter is stepped, whatever Inductor joins or moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import Residual
from torch import Tensor, nn

import fxprec
from fxprec.demo.models import CharTransformer

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "fp8": (lambda: CharTransformer(vocab=96, layers=1), lambda: torch.randint(0, 96, (8, 64))),
    # The gradient of the residual is added to a product with the second weight: Inductor makes one product of both.
    "fp32": (lambda: nn.Sequential(nn.Linear(16, 16), Residual(nn.Linear(16, 16))), lambda: torch.randn(8, 16)),
}


def moves(recipe: str, *, in_backward: bool) -> dict[str, Tensor]:
    """Return by how much one step moves each parameter. The rate is large: stepped weights give another gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = (make() for make in MODELS[recipe])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = fxprec.optim.SGD(model.parameters(), lr=8.0, update="nearest")
    options = {"recipe": recipe, "lowering": "inductor"} | ({"optimizer": optimizer} if in_backward else {})
    outputs = torch.compile(model, backend="fxprec", options=options)(inputs).flatten(0, -2)
    nn.functional.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[1]).backward()
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.inductor
@pytest.mark.parametrize("recipe", MODELS)
def test_what_backward_reads_of_a_parameter_is_read_before_it_is_stepped(recipe: str) -> None:
    """A bias may be summed in other bits."""
    wanted = moves(recipe, in_backward=False)
    for name, ours in moves(recipe, in_backward=True).items():
        assert (ours - wanted[name]).norm() <= 0.005 * wanted[name].norm(), name


class Shown(nn.Module):
    """A weight that a buffer shows, too: the first reader in forward reads the buffer, and so does the last in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("shown", self.second.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) @ self.shown)


def test_a_parameter_whose_memory_a_buffer_shares_is_stepped_after_backward() -> None:
    """Backward multiplied by the buffer after the step, and the first layer's gradient was that of another model."""

    def moved(*, in_backward: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Shown()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = fxprec.optim.SGD(model.parameters(), lr=8.0, update="nearest")
        options = {"recipe": "fp32", "lowering": "eager"} | ({"optimizer": optimizer} if in_backward else {})
        torch.compile(model, backend="fxprec", options=options)(torch.ones(8, 16)).square().sum().backward()
        optimizer.step()
        return [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]

    wanted = moved(in_backward=False)
    with pytest.warns(fxprec.FxprecWarning, match=r"second.weight: .* a buffer or an input shares its memory"):
        found = moved(in_backward=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
