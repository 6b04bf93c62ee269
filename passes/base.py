"""The contract of a pass: valid graph in, valid graph out.

A pass is a small frozen dataclass with a ``name`` and one ``apply``. It edits ``work.joint.graph`` or fills in one
field of `Work`; the runner (`pipeline.run`) lints, times and reports, so a pass never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from fxprec.config import Settings
from fxprec.config.settings import PeakBudget
from fxprec.numerics.blocks import BlockFormat
from fxprec.passes.analysis.assignment import Assignment
from fxprec.passes.analysis.gemm_costs import Answer
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.operators import Operators
from fxprec.passes.analysis.replay.other_sizes import OtherSizes
from fxprec.passes.notice import Notice
from fxprec.passes.part import Part
from fxprec.passes.sites import SiteBook
from fxprec.plan import PeakBytes, Plan, Site
from fxprec.plan.scales import ScaleGraph

T = TypeVar("T")


class Filled(Generic[T]):
    """A field of `Work` that the pass of this name fills. Reading the field earlier is a mistake in the pipeline."""

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
    """The ways in which a given plan has backward get each value."""

    sites: tuple[Site, ...]
    peak: PeakBytes


@dataclass(frozen=True, kw_only=True)
class InBlocks:
    """The block formats that one GEMM's operands are rounded to, by product; None where they are not."""

    forward: BlockFormat | None = None
    input_grad: BlockFormat | None = None
    weight_grad: BlockFormat | None = None
    why: str = ""
    """Why a product stays high that the recipe has a format for."""
    is_kept_high: bool = False
    """Whether ``keep_high`` names its module."""

    @property
    def formats(self) -> tuple[BlockFormat, ...]:
        """Return the formats of the products that have one."""
        return tuple(fmt for fmt in (self.forward, self.input_grad, self.weight_grad) if fmt is not None)


@dataclass
class Work:
    """Facts and decisions about one graph. The pass named beside a field fills it."""

    joint: JointGraph
    settings: Settings
    model: str = ""  # class of the module, or name of the function
    given: Plan | None = None  # a plan to follow instead of solving
    siblings: tuple[Plan, ...] = ()  # plans of the model's training graphs compiled before
    stepped: Mapping[int, int] = field(default_factory=dict)  # captured inputs that backward steps, bytes of workspace
    memory_budget: float = 1.0  # the user's activation_memory_budget: what the partitioner may save, 1 all it likes
    fixed_bytes: int = 0  # saved for backward beyond what is predicted of the counted tensors
    may_exceed_budget: bool = False  # it is held to once the graph is partitioned
    damage: dict[int, float] | None = None  # counted tensor's id -> measured damage, for policy "exact"
    operators = Filled[Operators]("recover-operators")
    grouped = Filled[Grouped]("group-tensors")
    assignment = Filled[Assignment]("assign-precision")
    book = Filled[SiteBook]("insert-casts")
    answers: tuple[Answer, ...] = ()  # weigh-gemms, one per GEMM
    in_blocks: tuple[InBlocks, ...] = ()  # block-gemms, one per GEMM, where the recipe rounds operands
    is_cut: bool = False  # whether the graph says what crosses: what backward computes again are nodes of its own
    peak: PeakBytes | None = None  # fit-peak, under a peak budget
    peak_sizes: OtherSizes | None = None  # fit-peak, under dynamic shapes
    looks_at_budgets: bool = False  # the plan says what the step takes under others
    peak_part: Part = field(default_factory=Part)  # of a peak budget, what the graph may hold
    plan = Filled[Plan]("write-plan")
    scales: ScaleGraph | None = None  # carry-scales and scale-copies, where a gradient or a copy has one
    unscaled: set[int] = field(default_factory=set)  # keep-signs: sites on a side of other numbers than 0
    remarks: list[str] = field(default_factory=list)  # what the plan should say; nothing was left out
    notices: list[Notice] = field(default_factory=list)
    facts: list[Notice] = field(default_factory=list)  # of the machine: what it lacks, and what is done instead

    @property
    def peak_goal(self) -> PeakBudget | GivenPeak | None:
        """Return the peak budget, or the plan made for one that says how backward gets each value, or None."""
        if not self.joint.tangents:
            return None
        if self.given is None:
            return self.settings.peak_budget
        return None if self.given.peak_bytes is None else GivenPeak(self.given.sites, self.given.peak_bytes)

    @property
    def fits_peak(self) -> bool:
        """Say whether a peak budget, or a plan made for one, decides how backward gets each value."""
        return self.peak_goal is not None

    def has(self, name: str) -> bool:
        """Say whether the pass that fills a field has run."""
        return name in vars(self)


class Pass(Protocol):
    """One step from joint graph to joint graph."""

    @property
    def name(self) -> str:
        """Return the name by which the command line and dumps know the pass."""

    def apply(self, work: Work) -> None:
        """Edit the joint graph of ``work``, or fill the fields of ``work`` that belong to the pass."""
