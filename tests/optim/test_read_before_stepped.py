"""What backward reads of a parameter is read before the parameter is stepped, whatever Inductor joins or moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.demo.models import CharTransformer


class Residual(nn.Module):
    """The gradient of the residual is added to a product with the second weight: Inductor makes one product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) + x


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "fp8": (lambda: CharTransformer(vocab=96, layers=1), lambda: torch.randint(0, 96, (8, 64))),
    "fp32": (Residual, lambda: torch.randn(8, 16)),
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
