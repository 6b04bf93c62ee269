"""The contract of a pass: valid graph in, valid graph out.

A pass is a small frozen dataclass with a ``name`` and one ``apply``. It edits ``work.joint.graph`` or fills in one
field of `Work`; the runner (`pipeline.run`) lints, times and reports, so a pass never does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from fxprec.config import Settings
from fxprec.passes.analysis.assignment import Assignment
from fxprec.passes.analysis.gemm_costs import Answer
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.operators import Operators
from fxprec.passes.casts.sites import SiteBook
from fxprec.plan import Plan
from fxprec.plan.scales import ScaleGraph


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user asked for and did not get."""

    site: str  # node, module and source line
    detail: str


@dataclass
class Work:
    """What the passes know of one graph so far. Each field is filled by the pass named beside it."""

    joint: JointGraph
    settings: Settings
    given: Plan | None = None  # a plan to follow instead of solving
    siblings: tuple[Plan, ...] = ()  # plans of the model's training graphs compiled before
    portable: bool = False  # the same arithmetic on every CPU: nothing that only some have
    memory_budget: float = 1.0  # the user's activation_memory_budget: what the partitioner may save, 1 all it likes
    fixed_bytes: int = 0  # saved for backward beyond what is predicted of the counted tensors
    may_exceed_budget: bool = False  # it is held to once the graph is partitioned
    damage: dict[int, float] | None = None  # counted tensor's id -> measured damage, for policy "exact"
    operators: Operators | None = None  # recover-operators
    grouped: Grouped | None = None  # group-tensors
    assignment: Assignment | None = None  # assign-precision
    book: SiteBook | None = None  # insert-casts
    answers: tuple[Answer, ...] = ()  # weigh-gemms, one per GEMM
    plan: Plan | None = None  # write-plan
    scales: ScaleGraph | None = None  # carry-scales, where a gradient needs one
    remarks: list[str] = field(default_factory=list)  # what the plan should say; nothing was left out
    notices: list[Notice] = field(default_factory=list)


class Pass(Protocol):
    """One step from joint graph to joint graph."""

    @property
    def name(self) -> str: ...

    def apply(self, work: Work) -> None: ...
