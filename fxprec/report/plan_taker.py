"""Keep the plan of a graph and nothing else: no file is written, and compilation ends after planning."""

from __future__ import annotations

from pathlib import Path

from fxprec.plan import Plan
from fxprec.report.dump_folder import DumpFolder
from fxprec.report.folder import GraphDump, Planned


class PlanTaker(DumpFolder):
    """Replaces a dump's folder, and keeps the plans of training graphs in memory."""

    def __init__(self) -> None:
        super().__init__(Path(), plan_only=True)
        self.plans: list[Plan] = []

    def graph(self, index: int) -> GraphDump:
        """Return an object that keeps the plan of one graph, in place of a folder."""
        return _Taken(self, index)

    @property
    def has_plans(self) -> bool:
        """Whether a plan was made."""
        return bool(self.plans)


class _Taken(GraphDump):
    looks_on = False

    def __init__(self, taker: PlanTaker, index: int) -> None:
        super().__init__(taker, index)
        self._taker = taker

    def finish(self, plan: Plan) -> None:
        self._taker.plans.append(plan)
        raise Planned
