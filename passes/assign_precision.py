"""Choose which tensors are low: by the configured policy (`assignment`), a given plan, or the training graph's plan.

An inference graph has no gradients to count, so the policy would see other group sizes there. An inference graph
therefore follows the plan of a training graph with the same GEMMs, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fxprec.config import Settings
from fxprec.config.recipes import Recipe
from fxprec.errors import PlanError
from fxprec.passes.analysis.assignment import Assignment, assign
from fxprec.passes.analysis.gemm_costs import gpu_of
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.saved_bytes import SavedBytes, bytes_in_float32, predicted_size
from fxprec.passes.analysis.selection import kept_high, without_effect
from fxprec.passes.analysis.sizes import Ranges, budget_note, order_notes, ranges_of
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.passes.base import Pass, Work
from fxprec.passes.notice import Notice, readable
from fxprec.plan import ByteCount, Plan
from fxprec.plan.compare import low_groups_with
from fxprec.plan.plan import latest_of_gemms


@dataclass(frozen=True)
class AssignPrecision(Pass):
    """Fill ``work.assignment``."""

    name: str = "assign-precision"
    rounds_values: bool = False
    """True in simulation: every reader gets the rounded value, and no copy is stored. Then every pattern of
    ``keep_high`` that matches changes numbers, and the activation budget limits the bytes that are predicted here."""

    def apply(self, work: Work) -> None:
        tensors = work.grouped.tensors
        if work.given is not None:
            work.assignment = _follow_given(work.given, work.grouped, work.settings.recipe)
            return
        sibling = None if work.joint.tangents else latest_of_gemms(work.siblings, work.grouped.gemms_by_name)
        if sibling is not None:
            low_groups = low_groups_with(sibling, work.grouped.grouping.borders)
            followed = _follow(sibling, low_groups, work.grouped, work.settings.recipe)
            pinned, _ = kept_high(tensors, work.settings.asked.keep_high, work.grouped.ends)
            work.assignment = replace(followed, low=followed.low - pinned)
            return
        if work.damage is not None:
            work.damage = _of_what_changes(work.damage, tensors)
        saved = SavedBytes.predict(tensors, work.settings.recipe)
        work.assignment = assign(
            tensors,
            self._settings(work),
            damage=work.damage,
            ends=work.grouped.ends,
            saved_bytes=replace(saved, fixed=work.fixed_bytes),
            may_exceed=work.may_exceed_budget,
        )
        texts = [*work.assignment.warnings, *(() if self.rounds_values else _without_effect(work))]
        work.notices += [Notice("assign-precision", text) for text in texts]
        ranges = ranges_of(work.joint.graph)
        if ranges and self.rounds_values:
            _remark_budget(work, ranges)
        if ranges:
            _remark_order(work, ranges)

    def _settings(self, work: Work) -> Settings:
        """Return the settings; under policy ``"exact"`` an evaluation stays high until training has measured damage."""
        if work.settings.asked.policy != "exact" or work.damage is not None or work.joint.tangents:
            return work.settings
        if self.rounds_values:
            work.notices.append(Notice("assign-precision", _NOT_MEASURED))
        return replace(work.settings, low_ratio=0.0)


_NOT_MEASURED = (
    "policy 'exact' measures damage in the first training step, and none has run: this evaluation rounds nothing, and "
    "rounds as training does from then on"
)


def _without_effect(work: Work) -> Iterator[str]:
    """Yield a message for each ``keep_high`` pattern that changes nothing because only backward reads 8 bits."""
    patterns, device = work.settings.asked.keep_high, work.joint.device
    multiplies_codes = gpu_of(device) is not None
    if patterns != "ends" and work.settings.recipe.has_low and not multiplies_codes:
        yield from without_effect(work.grouped.tensors if work.joint.tangents else (), patterns)


def _remark_budget(work: Work, ranges: Ranges) -> None:
    """Add a remark that says for which sizes within the guards the activation budget holds."""
    budget = work.settings.activation_budget
    if budget is None:
        return
    size = predicted_size(work.grouped.tensors, work.settings.recipe, work.assignment.low) + work.fixed_bytes
    note = budget_note(budget, readable(budget), size, ranges)
    if note is not None:
        work.remarks.append(note.text)
        work.notices += [Notice("assign-precision", note.text)] if note.is_broken else []


def _remark_order(work: Work, ranges: Ranges) -> None:
    """Add remarks that say for which sizes within the guards the order of demotion holds."""
    settings, grouped, assignment = work.settings, work.grouped, work.assignment
    if settings.asked.policy in ("size", "size-ascending") and settings.recipe.has_low and settings.low_ratio != 0:
        pinned, _ = kept_high(grouped.tensors, settings.asked.keep_high, grouped.ends)
        groups: dict[int, list[CountedTensor]] = {g: [] for g in assignment.order}
        for tensor in grouped.tensors:
            if tensor.id not in pinned:
                groups[tensor.group].append(tensor)
        order = sorted(groups, key=assignment.order.__getitem__)
        work.remarks += order_notes(order, groups, ranges, ascending=settings.asked.policy == "size-ascending")


def _of_what_changes(damage: Mapping[int, float], tensors: Sequence[CountedTensor]) -> dict[int, float]:
    """Leave out the damage of parameters' gradients, whose format does not depend on whether their group is low."""
    chosen = {t.id for t in tensors if t.kind != "grad_param"}
    return {tensor: lost for tensor, lost in damage.items() if tensor in chosen}


def _follow_given(plan: Plan, grouped: Grouped, recipe: Recipe) -> Assignment:
    """Follow the groups of a plan made for this graph. Raises `PlanError` if the number of groups differs."""
    if len(plan.groups) != grouped.num_groups:
        raise PlanError(
            f"the plan has {len(plan.groups)} groups, this graph {grouped.num_groups}: it belongs to another model; "
            "drop plan= to plan again"
        )
    return _follow(plan, plan.low_groups, grouped, recipe)


def _follow(plan: Plan, low_groups: frozenset[int], grouped: Grouped, recipe: Recipe) -> Assignment:
    """Return an assignment with ``low_groups`` low. Formats of single tensors follow later, from the plan's sites."""
    tensors = grouped.tensors
    low = frozenset(t.id for t in tensors if t.group in low_groups)
    order = [g.id for g in sorted(plan.groups, key=lambda g: g.order) if g.id < grouped.num_groups]
    order += range(len(order), grouped.num_groups)
    return Assignment(
        low=low,
        low_groups=low_groups,
        order={group: position for position, group in enumerate(order)},
        achieved_ratio=plan.achieved_low_ratio,
        bit_ratio=plan.bit_ratio,
        gap=plan.gap,
        policy=plan.policy,
        saved=ByteCount(fp32=bytes_in_float32(tensors), planned=SavedBytes.predict(tensors, recipe).total(low)),
    )
