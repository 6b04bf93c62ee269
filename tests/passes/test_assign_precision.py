"""Pass assign-precision: solve, follow a plan, or follow the training graph of the same GEMMs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import eager_backend
from one_pass import Ran, run_pass
from torch import nn

import fxprec
from fxprec import Plan, PlanError
from fxprec.passes.base import Work

NAME = "assign-precision"


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def ran(prepare=lambda work: None, **options: object) -> Ran:
    return run_pass(NAME, linears(), torch.randn(5, 4), **{"low_ratio": 0.5, **options}, prepare=prepare)


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    found = run_pass("write-plan", linears(), torch.randn(5, 4), low_ratio=0.5).work.plan
    assert found is not None
    return found


def test_low_groups_reach_the_ratio() -> None:
    made = ran()
    assignment = made.work.assignment
    assert made.is_unchanged()
    assert 0.5 <= assignment.achieved_ratio < 1
    tensors = made.work.grouped.tensors
    assert {t.group for t in tensors if t.id in assignment.low} == set(assignment.low_groups)
    assert {t.kind for t in tensors if t.id in assignment.low} >= {"output", "grad_output"}, "both halves"


def test_what_cannot_be_reached_is_told() -> None:
    made = ran(low_ratio=1.0, keep_high=["1"])
    (notice,) = made.work.notices
    assert notice.site == NAME
    assert "low_ratio 1 is not reached" in notice.detail


def test_a_given_plan_is_followed_whatever_the_ratio(plan: Plan) -> None:
    flipped = replace(plan, groups=tuple(replace(g, low=not g.low) for g in plan.groups))

    def given(work: Work) -> None:
        work.given = flipped

    assert ran(given).work.assignment.low_groups == flipped.low_groups != plan.low_groups


def test_a_plan_of_other_groups_is_refused(plan: Plan) -> None:
    def given(work: Work) -> None:
        work.given = replace(plan, groups=plan.groups[:2])

    with pytest.raises(PlanError, match="the plan has 2 groups, this graph 3: it belongs to another model; drop plan="):
        ran(given)


def test_evaluation_rounds_as_training_does_but_for_what_is_pinned(plan: Plan) -> None:
    everything = replace(plan, groups=tuple(replace(g, low=True) for g in plan.groups))

    def sibling(work: Work) -> None:
        work.siblings = (plan, everything)

    with torch.no_grad():
        made = ran(sibling, low_ratio=0.1, keep_high=["2"])
    low, tensors = made.work.assignment.low, made.work.grouped.tensors
    assert made.work.assignment.low_groups == everything.low_groups, "the latest"
    assert {t.module for t in tensors if t.id not in low} == {"2"}


def test_training_does_not_follow_another_graph(plan: Plan) -> None:
    everything = replace(plan, groups=tuple(replace(g, low=True) for g in plan.groups))

    def sibling(work: Work) -> None:
        work.siblings = (everything,)

    assert ran(sibling).work.assignment.low_groups == plan.low_groups


class Routed(nn.Module):
    """A router's scores weigh what two experts make of a normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(64), nn.Linear(64, 2)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        scores = self.gate(h).softmax(-1)
        return sum(scores[..., i, None] * expert(h) for i, expert in enumerate(self.experts))


def saved_with(keep_high: tuple[str, ...], **options: object) -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = eager_backend("fp8", keep_high=keep_high, **options)
    torch.compile(Routed(), backend=backend)(torch.randn(32, 64)).square().sum().backward()
    return backend.plans[0].saved_bytes.planned


def test_keep_high_names_the_module_that_makes_what_backward_reads_or_warns() -> None:
    words = (
        r"keep_high pattern 'gate' changes nothing: backward reads no output of these modules; .* name the module that"
    )
    plain = saved_with(())
    with pytest.warns(fxprec.FxprecWarning, match=words):
        assert saved_with(("gate",)) == plain
    assert saved_with(("norm",)) > plain, "its result is what the gate and the experts read"
    with pytest.raises(fxprec.FallbackError, match=words):
        saved_with(("gate",), strict=True)
