"""Make a plan file consistent that a person edited: if a group's ``low`` was switched, switch its sites too."""

from __future__ import annotations

from dataclasses import replace

from fxprec.errors import PlanError
from fxprec.numerics.formats import parse
from fxprec.plan.plan import Plan
from fxprec.plan.rows import Group, Site


def as_edited(plan: Plan) -> Plan:
    """Return ``plan`` with formats switched for the sites of every group whose ``low`` was switched by hand.

    A site keeps a promotion and a format that was set by hand. Raises `PlanError` if that format contradicts the
    group's ``low``.
    """
    switched = {g.id: g for g in plan.groups if g.solved_low not in (None, g.low)}
    sites = tuple(_switched(s, switched[s.group], plan) if s.group in switched else s for s in plan.sites)
    moved = sum(g.elements if g.low else -g.elements for g in switched.values())
    edited = replace(
        plan,
        sites=sites,
        groups=tuple(replace(g, solved_low=g.low) for g in plan.groups),
        achieved_low_ratio=min(1.0, max(0.0, plan.achieved_low_ratio + moved / max(plan.total_elements, 1))),
    )
    return edited if switched else plan


def _switched(site: Site, group: Group, plan: Plan) -> Site:
    if site.kind == "grad_param" or site.promoted_at is not None:
        return site
    fmt, (high, low) = parse(site.format), (plan.recipe.format_of(site.kind, low=is_low) for is_low in (False, True))
    if fmt.has_numbers_of(low) or fmt.has_numbers_of(high):
        return replace(site, format=(low if group.low else high).name, why="", unread=False, saved_as="", form="")
    if group.low != (fmt.bits < high.bits):
        raise PlanError(
            f"groups[{group.id}].low was set to {str(group.low).lower()} and sites[{site.id}].format ({site.tensor}) "
            f"to {site.format!r}, which contradict each other; undo one of the two"
        )
    return site
