"""The name of what Dynamo traces: a module's class, or a function's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxprec import compat


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Child(Net):
    """Has its forward from `Net`."""


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        torch._dynamo.graph_break()
        return y * x


NET = Net()


def step(x: Tensor) -> Tensor:
    return NET(x) * 2


def broken_step(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def evaluate(x: Tensor, model: nn.Module) -> Tensor:
    return model(x).sum()


@pytest.mark.parametrize(
    ("called", "names"),
    [
        (NET, ["Net"]),
        (Child(), ["Child"]),
        (Broken(), ["Broken", "Broken"]),
        (nn.Sequential(Net()), ["Sequential"]),
        (step, ["step"]),
        (broken_step, ["broken_step", "broken_step"]),
        (lambda x: evaluate(x, NET), ["<lambda>"]),
        (evaluate, ["Child"]),
    ],
    ids=["module", "inherited forward", "graph break", "of torch", "function", "resumed", "lambda", "argument"],
)
def test_a_graph_is_named(called: Callable[..., Tensor], names: list[str]) -> None:
    found = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        found.append(compat.traced_model())
        return gm.forward

    args = (torch.ones(2, 2), Child()) if called is evaluate else (torch.ones(2, 2),)
    torch.compile(called, backend=backend)(*args)
    assert found == names


def test_nobody_traces() -> None:
    assert compat.traced_model() == ""
