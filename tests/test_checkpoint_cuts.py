"""Checkpointed regions that Dynamo cuts, that are compiled in parts, or whose gradients are asked for in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from backend_helpers import FINE_TOLERANCE, eager_backend, relative_error
from checkpointed import SIDE, Two, agree, region
from models import Checkpointed, Parts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential, set_checkpoint_early_stop

from fxprec import FxprecWarning


def sequential() -> nn.Module:
    layers = nn.Sequential(*(Two() for _ in range(3)))
    return Parts(lambda m, x: checkpoint_sequential(m.layers, 2, x, use_reentrant=False), layers=layers)


class Compiled(nn.Module):
    """A region that is compiled once, in a region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = region(once, layer, x)
        return x


@torch.compiler.nested_compile_region
def once(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).tanh()  # type: ignore[no-any-return]


def test_a_sequence_in_segments_that_dynamo_cuts_at_each() -> None:
    assert len(agree(sequential, fullgraph=False).plans) > 1


@pytest.mark.filterwarnings("ignore:.*inside invoke_subgraph is not planned")
def test_regions_of_code_that_is_compiled_once() -> None:
    agree(Compiled)


class Broken(Two):
    """A region that Dynamo cuts: it is run by PyTorch, and its parts are compiled."""

    def part(self, x: Tensor) -> Any:
        y = self.second(x).tanh()
        torch._dynamo.graph_break()
        return y.exp() @ self.second.weight, y


@pytest.mark.parametrize("stops", [True, False])
def test_a_region_with_a_break_is_recomputed_part_by_part(stops: bool) -> None:
    with set_checkpoint_early_stop(stops):
        agree(Broken, fullgraph=False)


@pytest.mark.parametrize("stops", [True, False])
def test_a_region_around_layers_that_are_compiled_one_by_one(stops: bool) -> None:
    layers = (nn.RMSNorm(SIDE), nn.Linear(SIDE, SIDE), nn.GELU(), nn.Linear(SIDE, SIDE))
    model, x = Checkpointed(*layers), torch.randn(SIDE, SIDE, requires_grad=True)
    (model(x) ** 2).sum().backward()
    wanted = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    for layer in model.layers:
        layer.compile(backend=eager_backend("packed", low_ratio=1.0))
    with set_checkpoint_early_stop(stops):
        (model(x) ** 2).sum().backward()
    for found, exact in zip([x.grad, *(p.grad for p in model.parameters())], wanted, strict=True):
        assert found is not None
        assert exact is not None
        assert relative_error(found, exact) < FINE_TOLERANCE


class Resized(Two):
    def part(self, x: Tensor) -> Any:
        return F.dropout(self.second(x).tanh() * x.shape[0], 0.2)


def test_a_region_of_any_number_of_rows() -> None:
    agree(Resized, batches=[(torch.randn(rows, SIDE),) for rows in (8, 12, 5)], dynamic=True)


class Three(Two):
    def part(self, x: Tensor) -> Any:
        y = self.second(x)
        return y.tanh(), (y @ self.second.weight).exp(), y.sigmoid()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_of_one_result_leaves_the_others_without(place: int) -> None:
    model, x = Three(), torch.randn(SIDE, SIDE, requires_grad=True)
    wanted = [x, *model.parameters()]
    exact = torch.autograd.grad(model(x)[place].sum(), wanted)
    compiled = torch.compile(model, backend=eager_backend("packed", low_ratio=1.0), fullgraph=True)
    outputs = compiled(x)
    for _ in range(2):
        found = torch.autograd.grad(outputs[place].sum(), wanted, retain_graph=True)
        for a, b in zip(found, exact, strict=True):
            assert relative_error(a, b) < FINE_TOLERANCE


class Chunked(Two):
    """A loss whose chunks are differentiated inside of the compiled code, and then what stands before."""

    def forward(self, x: Tensor) -> Any:
        y = region(self.first, x)
        start = y.detach().requires_grad_()
        total = 0
        for row in range(0, SIDE, 8):
            loss = self.second(start[row : row + 8]).square().sum()
            loss.backward()
            total = total + loss.detach()
        y.backward(start.grad)
        return total


def test_a_loss_in_chunks_that_is_differentiated_inside() -> None:
    model, x = Chunked(), torch.randn(SIDE, SIDE)
    loss = model(x)
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    told = pytest.warns(FxprecWarning, match=r"torch\.autograd\.grad, test_checkpoint_cuts\.py:\d+: its backward is in")
    with torch._dynamo.config.patch(trace_autograd_ops=True), told:
        found = torch.compile(model, backend=eager_backend("packed", low_ratio=1.0), fullgraph=True)(x)
    assert relative_error(found, loss) < FINE_TOLERANCE
    for parameter, exact in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert exact is not None
        assert relative_error(parameter.grad, exact) < FINE_TOLERANCE
