"""Group tensors between adjacent GEMMs, by execution order or by data flow, and mark every node with its group."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.config.config import GroupingName
from fxprec.errors import PlanError
from fxprec.passes.analysis.dumped_tensors import mark_dumped
from fxprec.passes.analysis.groups import group_tensors
from fxprec.passes.analysis.marks import mark
from fxprec.passes.base import Pass, Work
from fxprec.passes.notice import Notice


@dataclass(frozen=True)
class GroupTensors(Pass):
    """Fill ``work.grouped``, and mark the tensors that ``dump_tensors`` names.

    A given plan determines the grouping. Raises `PlanError` if the user asks for another.
    """

    name: str = "group-tensors"
    copies_parameters: bool = False
    """Whether backward reads a rounded copy of a parameter, so that forward saves the copy."""

    def apply(self, work: Work) -> None:
        work.grouped = group_tensors(work.operators, _grouping(work), copies_parameters=self.copies_parameters)
        for op, group in work.grouped.group_of.items():
            for node in (*op.nodes, *op.backward):
                mark(node, group=group)
        patterns = work.settings.asked.dump_tensors
        if patterns and work.joint.tangents:
            work.notices += [Notice("dump_tensors", text) for text in mark_dumped(work.grouped, patterns)]


def _grouping(work: Work) -> GroupingName:
    """Return the grouping to use: the user's, or that of the plan that the graph follows.

    Raises `PlanError` if the user asks for another grouping than the plan has.
    """
    asked, followed = work.settings.asked.grouping, work.given
    if followed is None and not work.joint.tangents and work.siblings:
        followed = work.siblings[-1]
    if followed is None or followed.grouping == asked:
        return asked
    if asked != "execution":
        raise PlanError(
            f"the plan was made with grouping={followed.grouping!r}, and grouping={asked!r} is asked for; leave "
            "grouping= out to follow the plan, or drop plan= to plan again"
        )
    return followed.grouping
