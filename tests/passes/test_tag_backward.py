"""A custom autograd function's backward: torch does not tag its nodes, and they are backward's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import assert_bits_equal, compiled, eager_backend, gradients, recorded_works
from models import Parts

from fxprec.passes.analysis.joint import is_backward

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo's, of the custom function


class Squared(torch.autograd.Function):
    """(16, 32) times (32, 32), squared; backward multiplies again, so that no product is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).square()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = 2 * dys[0] * (x @ weight)
        return dy @ weight.T, x.T @ dy


def trained(backend: Any) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(32, 32), "last": nn.Linear(32, 32), "weight": nn.Parameter(torch.randn(32, 32) / 6)}
    model = Parts(lambda m, x: m.last(Squared.apply(m.first(x), m.weight)), **layers)
    x = torch.randn(16, 32)
    with recorded_works() as works:
        compiled(model, backend)(x).square().mean().backward()
    return gradients(model), works


def test_its_nodes_are_backwards_and_what_they_read_is_stored_low() -> None:
    """They counted as forward's, so nothing that serves them could be kept: choose-crossings raised."""
    found, (work,) = trained(eager_backend("fp8", low_ratio=1.0))
    made = work.joint.made_of_tangents() - {work.joint.output, *work.joint.tangents}
    assert [node.name for node in made if not is_backward(node)] == []
    products = [node for node in work.joint.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert [is_backward(node) for node in products].count(False) == 1, "the one of forward; backward multiplies again"
    wanted, _ = trained("aot_eager_decomp_partition")
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 0.1, name


def test_in_float32_its_gradients_are_torchs_own() -> None:
    found, _ = trained(eager_backend("fp32"))
    for name, gradient in trained("aot_eager_decomp_partition")[0].items():
        assert_bits_equal(found[name], gradient, name)
