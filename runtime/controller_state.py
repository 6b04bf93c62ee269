"""Read the plan in a controller's saved state and check that the state belongs to the same graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxprec.errors import PlanError
from fxprec.plan import Plan
from fxprec.runtime.scaling.keeper import Keeper


def plan_of(state: Mapping[str, object]) -> Plan:
    """Return the plan in a graph's saved state."""
    return Plan.from_dict(state["plan"])


def saved_plan(state: Mapping[str, Any], own: Plan, keeper: Keeper | None) -> Plan:
    """Return the plan in a saved state of the graph whose plan is ``own``. Raises `PlanError` for any other state."""
    plan = plan_of(state)
    difference = own.first_difference(plan, there="the saved state", sizes=False)
    if difference is not None:
        raise PlanError(
            f"the saved state belongs to another model or config: {difference}; load it where it was saved from"
        )
    scales = state["scales"]
    if (scales is None) != (keeper is None) or (keeper is not None and not _fits(scales, keeper)):
        raise PlanError("the saved state has other scales; load it under the grad_scaling it was saved with")
    further = () if keeper is None else keeper.graph.site_of
    pending = {stats["site"] for step in state.get("pending", ()) for stats in step["statistics"]}
    if unknown := pending - {*range(len(own.sites)), *further}:
        raise PlanError(
            f"the saved state has statistics of row {min(unknown)}, which its plan does not have; load it where it was "
            "saved from"
        )
    return plan


def _fits(scales: Mapping[str, Any], keeper: Keeper) -> bool:
    """Return whether saved scales come from this kind of keeper, with as many exponents and for casts it knows."""
    measured = {stats["site"] for stats in scales.get("measured", ())}
    casts = {int(row) for key in ("saturating", "clipped", "margins") for row in scales.get(key, ())}
    fresh = set(scales.get("fresh", ()))
    return (
        len(scales["exps"]) == len(keeper.exps)
        and ("good_steps" in scales) == ("good_steps" in keeper.state_dict())
        and fresh <= measured
        and casts | fresh <= keeper.graph.casts.keys()
    )
