"""The plan, immutable data that gives each tensor's format. `files` reads and writes plans as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from typing import Any, Literal, Self

from fxprec.config.recipes import BF16, Recipe
from fxprec.errors import PlanError
from fxprec.numerics.formats import Format, parse
from fxprec.plan import files, shown
from fxprec.plan.compare import first_difference
from fxprec.plan.reading import Entry
from fxprec.plan.rows import (
    ByteCount,
    Gemm,
    Group,
    LoweringChoice,
    OneLine,
    PeakBytes,
    SavedTensor,
    Share,
    Site,
    WholeStep,
)


def _version(package: str) -> str:
    try:
        return metadata.version(package).partition("+")[0]  # "2.13.0+cpu" and "2.13.0+cu130" make equal plans
    except metadata.PackageNotFoundError:
        return "unknown"


# (operator, module) of each GEMM, in execution order.
GemmNames = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The stored tensors of one compiled graph, with their formats and the reasons; see docs/architecture.md for terms.

    ``gemms``, ``groups`` and ``sites`` are numbered by position: ``plan.sites[i].id == i``. `load` raises `PlanError`
    for a file that is not a plan. Compiling raises it for a plan of another model.
    """

    sites: tuple[Site, ...] = ()
    gemms: tuple[Gemm, ...] = ()
    groups: tuple[Group, ...] = ()
    model: OneLine = field(default="", compare=False)
    """Class of the module that was compiled, or name of the function; ``""`` if unknown."""
    recipe: Recipe = BF16
    storage: Literal["native", "packed", "simulate"] = "native"
    policy: str = "size"
    grouping: Literal["execution", "dataflow"] = "execution"
    """The rule by which operators form groups, as in `Config.grouping`."""
    requested_low_ratio: Share | None = None
    """Lower bound on the low ratio; None if an activation budget replaces it."""
    activation_budget: int | None = None
    """Bytes, or None."""
    achieved_low_ratio: Share = 0.0
    """Elements of the groups or tensors that the policy made low / all elements, before promotions."""
    bit_ratio: float = 0.0
    """2 x (bits at all-high - bits) / bits at all-high; below the low ratio, since weight gradients stay high."""
    gap: float | None = None
    """Proved relative distance from the optimum (policy ``exact``); else None."""
    total_elements: int = 0
    saved_bytes: ByteCount | None = None
    """Bytes that the partitioned graph saves for backward; None without a backward half."""
    saved: tuple[SavedTensor, ...] = ()
    """The tensors counted in ``saved_bytes``; empty until the graph is partitioned."""
    peak_bytes: PeakBytes | None = None
    """Peak of a step under a peak budget; None without one."""
    whole_step: WholeStep | None = field(default=None, compare=False)
    """Bytes that a step budget counts besides the peak; None without a step budget."""
    lowering: LoweringChoice | None = field(default=None, compare=False)
    """The choice of ``lowering="auto"``, which changes no number; None for another lowering, or before compiling."""
    notes: tuple[str, ...] = ()
    """Remarks, such as operators with unscaled gradients. A request that is not fulfilled is a warning instead."""
    schema: int = files.SCHEMA
    fxprec: str = field(default_factory=lambda: _version("fxprec"))
    torch: str = field(default_factory=lambda: _version("torch"))

    def __post_init__(self) -> None:
        for rows in (self.gemms, self.groups, self.sites):
            assert all(row.id == i for i, row in enumerate(rows)), "ids are positions"  # type: ignore[attr-defined]

    def format(self, site: int | Site) -> Format:
        """Return the format in force at a site (or at the site of that id)."""
        return parse((self.sites[site] if isinstance(site, int) else site).format)

    @property
    def is_evaluation(self) -> bool:
        """Whether the graph has no backward half."""
        return self.saved_bytes is None

    @cached_property
    def formats(self) -> Mapping[tuple[str, str], str]:
        """The format names by (tensor, kind), which another compilation of the same model follows."""
        return {(site.tensor, site.kind): site.format for site in self.sites}

    @property
    def operand_formats(self) -> tuple[tuple[str, str, str], ...]:
        """For each GEMM, the block formats of its operands: forward, input gradient, weight gradient."""
        return tuple((gemm.forward, gemm.input_grad, gemm.weight_grad) for gemm in self.gemms)

    @property
    def gemms_by_name(self) -> GemmNames:
        """Operator and module of each GEMM, which are equal for all graphs of one model (`latest_of_gemms`)."""
        return tuple((gemm.op, gemm.module) for gemm in self.gemms)

    @cached_property
    def low_groups(self) -> frozenset[int]:
        """The ids of the groups that the policy made low."""
        return frozenset(group.id for group in self.groups if group.low)

    @property
    def promoted(self) -> tuple[Site, ...]:
        """The sites promoted so far."""
        return tuple(site for site in self.sites if site.promoted_at is not None)

    @property
    def promoted_ratio(self) -> float:
        """Elements of promoted tensors / all elements, at the traced sizes."""
        return sum(site.elements for site in self.promoted) / max(self.total_elements, 1)

    @property
    def low_ratio(self) -> float:
        """The share of all elements that the policy made low, less promoted ones; see `saved_low_share` for bytes."""
        return max(0.0, self.achieved_low_ratio - self.promoted_ratio)

    @property
    def saved_low_share(self) -> float:
        """The share of the bytes saved for backward that is stored in fewer than 16 bits; 0 if none are saved."""
        return saved_low_share((self,))

    def mean_demoted_ratio(self, steps: int) -> float:
        """Return `low_ratio` averaged over the first ``steps`` steps, or the first ratio for 0 steps.

        A tensor promoted after step k was low in steps 1 to k. If k > ``steps``, the promotion happened in an earlier
        run whose plan file this run follows, so the tensor was high in all steps. Source: Lee et al. 2023, section 5.2,
        which averages over epochs.
        """
        low_steps = [
            s.promoted_at if s.promoted_at is not None and s.promoted_at <= steps else 0 for s in self.promoted
        ]
        lost = sum(s.elements * (steps - low) for s, low in zip(self.promoted, low_steps, strict=True))
        return max(0.0, self.achieved_low_ratio - lost / max(steps * self.total_elements, 1))

    def with_high_operands(self, why: str) -> Self:
        """Return a plan whose GEMMs multiply operands in the recipe's ``hi``, with ``why`` as the reason."""
        changed = [
            replace(gemm, forward="", input_grad="", weight_grad="", operands_why=why) if any(formats) else gemm
            for gemm, formats in zip(self.gemms, self.operand_formats, strict=True)
        ]
        return replace(self, gemms=tuple(changed))

    def promote(self, sites: Iterable[int], *, step: int, hi: str | None = None) -> Self:
        """Return a plan with ``sites`` in the high format from now on; the same plan if nothing changes.

        ``hi`` is a format name, by default the recipe's ``hi``. Sites already high or promoted stay as they are. Raises
        `PlanError` for a site that does not exist or is a gradient: only forward tensors are promoted.
        """
        name = parse(hi).name if hi is not None else self.recipe.hi.name
        changed = {i: _promoted(self._forward_site(i), step, name) for i in sites}
        if all(self.sites[i] is site for i, site in changed.items()):
            return self
        return replace(self, sites=tuple(changed.get(site.id, site) for site in self.sites))

    def _forward_site(self, i: int) -> Site:
        if not 0 <= i < len(self.sites):
            raise PlanError(
                f"site {i} cannot be promoted: the plan has sites 0 to {len(self.sites) - 1}; see plan.sites"
            )
        site = self.sites[i]
        if site.kind in ("grad_output", "grad_param"):
            raise PlanError(
                f"site {i} ({site.tensor}, {site.kind}) cannot be promoted: gradients keep their format; "
                "tune grad_scaling instead"
            )
        return site

    def first_difference(self, other: Plan, *, there: str = "the other plan", sizes: bool = True) -> str | None:
        """Return a text on the first difference between two plans' models, or None.

        Formats, low groups and versions are not part of the model. ``sizes=False`` ignores elements and shapes, so that
        plans of one model at two batch sizes are equal.
        """
        return first_difference(self, other, there=there, sizes=sizes)

    def __repr__(self) -> str:
        return f"<Plan: {shown.line((self,))}>"

    def _repr_html_(self) -> str:
        return shown.html((self,), f"Plan: {self.recipe.name}, {self.storage} storage, policy {self.policy}")

    def summary(self) -> str:
        """Return the plan's decisions in one line."""
        low, saved = len(self.low_groups), self.saved_bytes
        bytes_saved = "" if saved is None else f", {saved.planned} of {saved.fp32} bytes saved for backward"
        return (
            f"recipe {self.recipe.name}, {self.storage} storage: {low} of {len(self.groups)} groups low, "
            f"{self.achieved_low_ratio:.4f} of {self.total_elements} elements, {len(self.sites)} sites{bytes_saved}"
        )

    def explain(self, name: str = "") -> str:
        """Return the list of tensors saved for backward, as ``fxprec explain`` prints it.

        ``name`` selects one explanation instead: of a tensor, a module, a site's number, ``lowering``, ``peak_budget``
        or ``step_budget``. Raises `PlanError` for a name that the plan does not have.
        """
        from fxprec.plan.explain import explain

        return "\n".join(explain(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON data, keys in a fixed order."""
        return files.to_dict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan atomically; equal plans give equal bytes. Raises `PlanError`."""
        files.write(files.dumps(self), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file as plain data; nothing in it is executed. Raises `PlanError`, naming the entry."""
        return files.load(path, cls)

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Return the plan from a result of `to_dict`, checked like a file. Raises `PlanError` naming the entry."""
        return files.read_checked(Entry(data), cls)


def _promoted(site: Site, step: int, hi: str) -> Site:
    if site.promoted_at is not None or site.format == hi:
        return site
    return replace(site, format=hi, promoted_at=step, saved_as="", form="")


def saved_low_share(plans: Sequence[Plan]) -> float:
    """Return the share of the bytes that plans save for backward that is stored in fewer than 16 bits."""
    rows = [row for plan in plans for row in plan.saved if not row.on_host]
    return sum(row.bytes for row in rows if 0 < row.bits < 16) / max(sum(row.bytes for row in rows), 1)


def latest_of_gemms(plans: Sequence[Plan], gemms: GemmNames) -> Plan | None:
    """Return the latest plan with these GEMMs, or None. Evaluation follows this plan to round as training does."""
    return next((plan for plan in reversed(plans) if plan.gemms_by_name == gemms), None)
