"""The contract of a pass: it takes a valid joint graph and leaves a valid joint graph.

A pass is a small frozen dataclass with a ``name`` and one method, ``apply``. A pass edits ``work.joint.graph`` or fills
fields of `Work`. The runner (`pipeline.run`) lints the graph, times the pass and reports changes, so a pass does none
of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch.fx import Node

from fxprec.config import Settings
from fxprec.config.operands import Product
from fxprec.config.settings import PeakBudget
from fxprec.numerics.blocks import BlockFormat
from fxprec.passes.analysis.assignment import Assignment
from fxprec.passes.analysis.gemm_costs import Answer
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.operators import Operators
from fxprec.passes.analysis.replay.other_sizes import OtherSizes
from fxprec.passes.budget_part import BudgetPart
from fxprec.passes.notice import Notice
from fxprec.passes.sites import SiteBook
from fxprec.plan import PeakBytes, Plan, Site
from fxprec.plan.scales import ScaleGraph

T = TypeVar("T")


class Filled(Generic[T]):
    """A field of `Work` that the pass named ``by`` fills. Reading the field earlier fails an assertion."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __set_name__(self, owner: type[object], name: str) -> None:
        self.name = name

    def __get__(self, work: object, owner: type[object]) -> T:
        assert self.name in vars(work), f"work.{self.name} is read before {self.by} has run"
        value: T = vars(work)[self.name]
        return value

    def __set__(self, work: object, value: T) -> None:
        vars(work)[self.name] = value


@dataclass(frozen=True)
class GivenPeak:
    """A given plan made under a peak budget: its sites say how backward gets each value."""

    sites: tuple[Site, ...]
    peak: PeakBytes


@dataclass(frozen=True, kw_only=True)
class OperandFormats:
    """The block formats that one GEMM's operands are rounded to, by product; a product that is left out stays high."""

    formats: Mapping[Product, BlockFormat] = field(default_factory=dict)
    why: str = ""
    """Why a product stays high although the recipe has a block format for it."""
    is_kept_high: bool = False
    """Whether a pattern of ``keep_high`` matches the GEMM's module."""


@dataclass
class Work:
    """Facts and decisions about one joint graph. The pass named beside a field fills it."""

    joint: JointGraph
    settings: Settings
    model: str = ""  # class name of the module, or name of the function
    given: Plan | None = None  # a plan to follow instead of solving
    siblings: tuple[Plan, ...] = ()  # plans of the model's training graphs that were compiled before
    stepped: Mapping[int, int] = field(default_factory=dict)  # parameter that backward steps -> bytes of workspace
    memory_budget: float = 1.0  # torch's activation_memory_budget: share of bytes that may be saved, 1 for no bound
    fixed_bytes: int = 0  # bytes saved for backward beyond those predicted for the counted tensors
    may_exceed_budget: bool = False  # True: the driver checks the activation budget after the partition instead
    damage: dict[int, float] | None = None  # counted tensor's id -> measured damage, for policy "exact"
    comparisons: set[Node] = field(default_factory=set)  # compare-in-forward: with numbers, backward may repeat them
    operators = Filled[Operators]("recover-operators")
    grouped = Filled[Grouped]("group-tensors")
    assignment = Filled[Assignment]("assign-precision")
    book = Filled[SiteBook]("insert-casts")
    answers: tuple[Answer, ...] = ()  # weigh-gemms, one per GEMM
    operand_formats: tuple[OperandFormats, ...] = ()  # block-gemms, one per GEMM, if the recipe rounds operands
    has_crossings: bool = False  # choose-crossings: recomputed values have backward nodes; min-cut is not run
    peak: PeakBytes | None = None  # choose-crossings, under a peak budget
    peak_sizes: OtherSizes | None = None  # choose-crossings, under a peak budget and dynamic shapes
    looks_at_budgets: bool = False  # whether the plan also lists the step's memory and time under other peak budgets
    peak_part: BudgetPart = field(default_factory=BudgetPart)  # of a peak budget that several graphs share
    plan = Filled[Plan]("write-plan")
    scales: ScaleGraph | None = None  # carry-scales, keep-signs, scale-copies; None: nothing has a scale
    unscaled: set[int] = field(default_factory=set)  # keep-signs: rows kept beyond a bound near 0: no scale
    remarks: list[str] = field(default_factory=list)  # notes for the plan; nothing that the user asked for is missing
    notices: list[Notice] = field(default_factory=list)
    facts: list[Notice] = field(default_factory=list)  # what the machine lacks, and what is done instead

    @property
    def peak_goal(self) -> PeakBudget | GivenPeak | None:
        """Return the peak budget, or a given plan made under one; None without either, or without backward."""
        if not self.joint.tangents:
            return None
        if self.given is None:
            return self.settings.peak_budget
        return None if self.given.peak_bytes is None else GivenPeak(self.given.sites, self.given.peak_bytes)

    @property
    def fits_peak(self) -> bool:
        """Return whether a peak budget, or a given plan made under one, decides how backward gets each value."""
        return self.peak_goal is not None

    def has(self, name: str) -> bool:
        """Return whether the pass that fills the field ``name`` has run."""
        return name in vars(self)


class Pass(Protocol):
    """One rewrite of the joint graph."""

    @property
    def name(self) -> str:
        """Return the name of the pass on the command line and in dumps."""

    def apply(self, work: Work) -> None:
        """Edit the joint graph of ``work``, or fill the fields of ``work`` that belong to the pass."""
