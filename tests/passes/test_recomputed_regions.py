"""Regions the user recomputes: which nodes are in one, and what its boundary is."""

from __future__ import annotations

from typing import Any

import torch
from one_pass import run_pass
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from fxprec.passes.analysis import regions

aten = torch.ops.aten


class Twice(nn.Module):
    """A region, one that begins where it ends, and a layer behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda v: self.a(v).tanh(), x, use_reentrant=False)
        x = checkpoint(lambda v: self.b(v).tanh(), x, use_reentrant=False)
        return self.c(x)


def forward_nodes(model: Any, target: object) -> list[Node]:
    joint = run_pass("group-tensors", model, torch.randn(3, 4)).work.joint
    found = joint.graph.find_nodes(op="call_function", target=target)
    return [n for n in found if not regions.is_backward(n)]


def test_what_is_computed_in_a_region_is_recomputed_and_what_is_not_is_not() -> None:
    inside_a, inside_b, behind = forward_nodes(Twice(), aten.addmm.default)
    assert regions.is_marked_recompute(inside_a)
    assert regions.is_marked_recompute(inside_b)
    assert inside_a.meta[regions.REGION] != inside_b.meta[regions.REGION]
    assert not regions.is_marked(behind)
    assert not regions.must_recompute(behind)


def test_the_boundary_is_where_the_next_region_or_the_backward_behind_starts() -> None:
    first, second = forward_nodes(Twice(), aten.tanh.default)
    assert regions.is_boundary(first)
    assert regions.is_boundary(second)
    inside, _, _ = forward_nodes(Twice(), aten.addmm.default)
    assert not regions.is_boundary(inside)


def test_a_parameter_is_made_again_where_only_regions_read_it() -> None:
    joint = run_pass("group-tensors", Twice(), torch.randn(3, 4)).work.joint
    recomputed = {
        joint.describe(n).name: regions.is_read_by_regions_only(n)
        for n in joint.placeholders
        if joint.describe(n).kind == "param"
    }
    assert {name for name, is_recomputed in recomputed.items() if is_recomputed} == {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    }


def test_readers_are_seen_through_views_and_each_once() -> None:
    def function(x: Tensor) -> Tensor:
        wide = x.sin()
        return wide.view(-1) * wide.t().reshape(-1) + 1

    joint = run_pass("group-tensors", function, torch.randn(4, 4, requires_grad=True)).work.joint
    (wide,) = joint.graph.find_nodes(op="call_function", target=aten.sin.default)
    forward = [n.target for n in regions.readers_of(wide) if not regions.is_backward(n)]
    assert set(forward) <= {aten.mul.Tensor, aten.clone.default}
    assert len(forward) == len(set(forward))
