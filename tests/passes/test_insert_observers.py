"""Pass insert-observers: every counted tensor is seen beside its gradient, once."""

from __future__ import annotations

import torch
from models import Residual
from one_pass import run_pass
from torch import nn

from fxprec.ir import symbolic
from fxprec.passes.analysis.joint import is_backward

NAME = "insert-observers"


def observed(model: nn.Module, *args: torch.Tensor):
    ran = run_pass(NAME, model, *args, policy="exact", low_ratio=0.5)
    return ran, {n.args[2]: n for n in ran.nodes(symbolic.Observe.target)}


def test_each_value_with_a_gradient_is_observed_in_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    ran, by_id = observed(model, torch.randn(5, 4))
    assert ran.halves(symbolic.Observe.target) == (0, len(by_id))
    names = {t.id: t for t in ran.work.grouped.tensors}
    found = {(names[i].kind, names[i].module) for i in by_id}
    assert found >= {("param", "0"), ("param", "2"), ("output", "1")}
    for node in by_id.values():
        gradient, value, _, forward, backward = node.args
        assert gradient.meta["val"].shape == value.meta["val"].shape
        assert (is_backward(gradient), is_backward(value)) == (True, False)
        assert (forward, backward) == ("e4m3fn", "e5m2_sat")


def test_the_graph_goes_on_from_what_was_observed() -> None:
    _, by_id = observed(nn.Linear(4, 6), torch.randn(5, 4, requires_grad=True))
    for node in by_id.values():
        assert list(node.users), "its result is the gradient"
        others = [u for u in node.args[0].users if u is not node]
        assert others == [], "nothing reads the gradient past it"


def test_values_that_share_a_gradient_are_observed_one_after_the_other() -> None:
    ran, by_id = observed(Residual(nn.Linear(4, 4), nn.ReLU()), torch.randn(5, 4, requires_grad=True))
    ran.work.joint.graph.lint()
    shared = [n for n in by_id.values() if any(u in by_id.values() for u in n.users)]
    assert shared, "one reads the other"
    compiled = torch.compile(
        Residual(nn.Linear(4, 4), nn.ReLU()),
        backend="fxprec",
        options={"recipe": "fp8", "policy": "exact", "lowering": "eager"},
    )
    compiled(torch.randn(5, 4, requires_grad=True)).sum().backward()


def test_what_wants_no_gradient_is_not_observed() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    ran, by_id = observed(model, torch.randn(5, 4))
    names = {t.id: t.module for t in ran.work.grouped.tensors}
    assert {names[i] for i in by_id} <= {"1"}
    assert ("param", "0") not in {(t.kind, t.module) for t in ran.work.grouped.tensors if t.id in by_id}
