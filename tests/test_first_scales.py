"""The first backward pass scales its gradients, whatever was asked or run between it and its forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.config.recipes import FP8
from fxprec.numerics.formats import parse

NARROW = replace(FP8, name="narrow", hi=parse("fp16"), lo_backward=parse("e5m2"))


class Net(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.two(torch.relu(x))


def gradients(
    between: Callable[[fxprec.Backend, nn.Module, Tensor], object] | None = None, *, breaks: bool = False
) -> dict[str, Tensor]:
    """Return the first step's gradients, of activations that move the scales of stored copies at once."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Net(breaks), torch.randn(64, 64) * 1e-2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.2)
    backend = fxprec.Backend(fxprec.Config(recipe=NARROW, lowering="eager"))
    compiled = torch.compile(model, backend=backend)
    loss = compiled(x).mean() * 1e-6
    if between is not None:
        between(backend, compiled, x)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


BETWEEN = {
    "stats": lambda backend, compiled, x: backend.stats(),
    "state_dict": lambda backend, compiled, x: backend.state_dict(),
    "a second forward": lambda backend, compiled, x: compiled(x),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_looking_or_running_forward_again_changes_no_gradient(
    between: Callable[[fxprec.Backend, nn.Module, Tensor], object],
) -> None:
    wanted, found = gradients(), gradients(between)
    assert all(bool(grad.any()) for name, grad in wanted.items() if name.endswith("weight"))
    for name, grad in wanted.items():
        assert torch.equal(found[name], grad), name


def test_after_a_graph_break_both_graphs_have_scales() -> None:
    wanted, found = gradients(), gradients(breaks=True)
    for name, grad in wanted.items():
        assert (found[name] - grad).norm() <= 0.1 * grad.norm(), name
