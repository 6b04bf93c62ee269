"""Pass write-plan: the plan says what the passes before it decided."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
import torch
from one_pass import run_pass
from torch import nn

from fxprec import Plan, PlanError
from fxprec.passes.base import Work

NAME = "write-plan"


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def plan_of(model: nn.Module, **options: object) -> tuple[Plan, Work]:
    ran = run_pass(NAME, model, torch.randn(5, 4), **options)
    assert ran.is_unchanged()
    assert ran.work.plan is not None
    return ran.work.plan, ran.work


def test_groups_gemms_and_sites_are_those_decided() -> None:
    plan, work = plan_of(linears(), low_ratio=0.5, storage="packed")
    assert [(g.op, g.module, g.group_before, g.group_after) for g in plan.gemms] == [
        ("aten.addmm", "0", 0, 1),
        ("aten.addmm", "2", 1, 2),
    ]
    assert [g.elements for g in plan.groups] == [work.grouped.group_size(i) for i in range(3)]
    assert [sum(astuple(g.elements_by_kind)) for g in plan.groups] == [g.elements for g in plan.groups]
    assert plan.total_elements == sum(g.elements for g in plan.groups)
    assert {g.id for g in plan.groups if g.low} == set(work.assignment.low_groups)
    assert plan.sites == tuple(work.book.sites)
    assert {"output", "grad_output"} <= {s.kind for s in plan.sites}, "both halves"
    assert plan.saved_bytes == work.assignment.saved


def test_evaluation_saves_nothing() -> None:
    with torch.no_grad():
        plan, _ = plan_of(linears())
    assert plan.saved_bytes is None


def test_what_the_passes_remarked_is_a_note() -> None:
    ran = run_pass(NAME, linears(), torch.randn(5, 4), prepare=lambda work: work.remarks.append("a remark"))
    assert "a remark" in ran.work.plan.notes


def test_a_given_plan_is_followed_in_what_was_asked_and_must_be_of_this_model() -> None:
    plan, _ = plan_of(linears(), low_ratio=0.5)

    def given(work: Work) -> None:
        work.given = replace(plan, requested_low_ratio=0.25)

    assert (
        run_pass(NAME, linears(), torch.randn(5, 4), low_ratio=0.5, prepare=given).work.plan.requested_low_ratio == 0.25
    )
    wider = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.Linear(3, 3))
    with pytest.raises(PlanError, match="the given plan belongs to another model"):
        run_pass(NAME, wider, torch.randn(5, 4), low_ratio=0.5, prepare=given)
