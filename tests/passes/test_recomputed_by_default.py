"""What backward recomputes without a budget, and what it does not: squares, masks, chains of residual blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import Apply, Residual
from one_pass import run_pass
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

from fxprec.passes.analysis.joint import is_backward
from tests.helpers import compiled, eager_backend


def saved(function: Callable[[Tensor], Tensor], width: int = 64) -> set[str]:
    """The tensors that the network of two layers around a function saves in 8 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, width), Apply(function), nn.Linear(64, 16))
    compiled(model, backend := eager_backend("fp8", low_ratio=1.0))(torch.randn(128, 48)).sin().sum().backward()
    return {s.tensor for s in backend.plans[0].sites if s.format == "e4m3fn" and s.kind == "output"}


@pytest.mark.parametrize(
    ("function", "operand"),
    [
        (F.gelu, None),
        (lambda x: x * torch.sigmoid(x), None),
        (F.relu, "relu"),
        (lambda x: x.square(), "pow_1"),
        (lambda x: x - torch.tanh(x), "sub"),
    ],
    ids=["gelu", "silu", "relu", "square", "difference"],
)
def test_the_second_layers_operand_is_stored_where_a_recomputation_would_spoil_it(function, operand: str | None):
    found = saved(function)
    assert (operand in found) if operand else found == {"args.0", "addmm"}


def test_of_a_gated_layer_the_two_factors_are_stored() -> None:
    assert saved(lambda x: F.silu(x[:, :64]) * x[:, 64:], 128) == {"args.0", "addmm"}


def convolved() -> nn.Module:
    layers = nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)
    nn.init.normal_(layers[1].bias)
    return nn.Sequential(*layers)


def test_the_mask_of_a_relu_is_that_of_forward() -> None:
    """A norm's result computed from 8 bits has another sign in 1 % of places, each of which would change its gradient."""
    model, x = convolved(), torch.randn(8, 4, 16, 16)
    compiled(model, eager_backend("fp8", low_ratio=1.0))(x).sin().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sin().sum().backward()
    for gradient, p in zip(found, model.parameters(), strict=True):
        if p.grad.norm() > 1e-3:  # not the bias before a norm
            assert float((gradient - p.grad).norm() / p.grad.norm()) < 0.04


def recomputed(target: object, model: nn.Module, x: Tensor) -> list[Node]:
    nodes = run_pass("choose-crossings", model, x, recipe="bf16").nodes(target)
    return [node for node in nodes if is_backward(node)]


def behind(node: Node) -> set[Node]:
    """The backward nodes that a backward node is computed from."""
    found, stack = set[Node](), [node]
    while stack:
        new = {n for n in stack.pop().all_input_nodes if is_backward(n)} - found
        found |= new
        stack += new
    return found


def test_a_residual_block_is_not_recomputed_from_the_one_before() -> None:
    """Else backward would compute all of them first, and hold each until its own block."""
    blocks = [(Residual(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)), nn.ReLU()) for _ in range(4)]
    between = [layer for block in blocks for layer in block]
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), *between, nn.Conv2d(8, 4, 3, padding=1))
    found = recomputed(torch.ops.aten.relu.default, model, torch.randn(4, 4, 16, 16))
    assert not any(behind(relu) & set(found) for relu in found)


def test_behind_a_convolution_a_norm_is_recomputed_as_if_it_were_the_first() -> None:
    """Nothing is recomputed through a convolution, so its result starts no chain."""

    def subtracted(blocks: int) -> int:
        layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(blocks)]
        model = nn.Sequential(*(layer for block in layers for layer in block), nn.Conv2d(8, 4, 3, padding=1))
        return len(recomputed(torch.ops.aten.sub.Tensor, model, torch.randn(4, 8, 16, 16)))

    assert subtracted(3) == 3 * subtracted(1)


def test_a_norm_between_two_convolutions_is_recomputed_in_bf16() -> None:
    layers = nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)
    assert len(recomputed(torch.ops.aten.relu.default, nn.Sequential(*layers), torch.randn(4, 4, 16, 16))) == 1


def test_a_peak_budget_that_the_plan_without_one_keeps_changes_nothing() -> None:
    def trained(budget: str | None) -> tuple[list[tuple[str, str, int]], list[Tensor]]:
        torch.manual_seed(0)
        model, x = convolved(), torch.randn(8, 4, 16, 16)
        step = compiled(model, backend := eager_backend("fp8", low_ratio=None, peak_budget=budget))
        step(x).sin().sum().backward()
        saved = [(row.tensor, row.format, row.bytes) for row in backend.plans[0].saved]
        return sorted(saved), [p.grad for p in model.parameters()]

    (saved, gradients), (wanted, references) = trained("100%"), trained(None)
    assert saved == wanted
    assert all(map(torch.equal, gradients, references))


def test_without_a_budget_too_a_convolutions_two_gradients_are_computed_one_after_the_other() -> None:
    ran = run_pass("shorten-lives", convolved(), torch.randn(4, 4, 16, 16))
    asked = [node.args[-1][:2] for node in ran.nodes(torch.ops.aten.convolution_backward.default)]
    assert asked == [[False, True]] * 2, "of the weights; the input's gradient is a convolution of its own"
