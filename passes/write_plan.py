"""Write the passes' decisions into the immutable, serialisable `Plan`."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from fxprec.config.recipes import Recipe
from fxprec.passes.analysis.assignment import Assignment
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.saved_bytes import SavedBytes
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.passes.base import OperandFormats, Pass, Work
from fxprec.plan import Gemm, Group, KindCounts, Plan
from fxprec.plan.compare import another_model

_EVALUATION = "evaluation: the graph has no backward half, so nothing is saved for it"


@dataclass(frozen=True)
class WritePlan(Pass):
    """Fill ``work.plan``. Raises `PlanError` where a given plan describes another model."""

    name: str = "write-plan"

    def apply(self, work: Work) -> None:
        settings, assignment = work.settings, work.assignment
        plan = Plan(
            model=work.model,
            recipe=settings.recipe,
            storage=settings.storage,
            policy=assignment.policy,
            grouping=work.grouped.grouping.name,
            requested_low_ratio=settings.low_ratio if work.given is None else work.given.requested_low_ratio,
            activation_budget=settings.activation_budget if work.given is None else work.given.activation_budget,
            achieved_low_ratio=assignment.achieved_ratio,
            bit_ratio=assignment.bit_ratio,
            gap=assignment.gap,
            total_elements=sum(t.elements for t in work.grouped.tensors),
            saved_bytes=assignment.saved if work.joint.tangents else None,
            peak_bytes=work.peak,
            gemms=_gemms(work),
            groups=_groups(work.grouped, assignment, settings.recipe),
            sites=tuple(work.book.sites),
            notes=(*(() if work.joint.tangents else (_EVALUATION,)), *work.remarks),
        )
        if work.given is not None:
            _refuse_another_model(plan, work.given)
        work.plan = plan


def _gemms(work: Work) -> tuple[Gemm, ...]:
    return tuple(
        Gemm(
            id=i,
            node=op.name,
            op=op.aten,
            module=op.module,
            group_before=before,
            group_after=after,
            pays=answer.pays,
            why=answer.why,
            **{product: fmt.name for product, fmt in formats.formats.items()},
            operands_why=formats.why,
        )
        for i, (op, (before, after), answer, formats) in enumerate(
            zip(
                work.grouped.gemms,
                work.grouped.grouping.borders,
                work.answers,
                work.operand_formats or (OperandFormats(),) * len(work.answers),
                strict=True,
            )
        )
    )


def _groups(grouped: Grouped, assignment: Assignment, recipe: Recipe) -> tuple[Group, ...]:
    counts, saved = defaultdict[int, Counter[str]](Counter), defaultdict[int, list[CountedTensor]](list)
    for tensor in grouped.tensors:
        counts[tensor.group][tensor.kind] += tensor.elements
        saved[tensor.group] += [tensor] if tensor.saved else []
    bytes_of = SavedBytes.predict(grouped.tensors, recipe)
    names: dict[int, list[str]] = defaultdict(list)
    for op, group in grouped.group_of.items():
        if op.outputs and not op.is_view:
            names[group].append(op.name)
    return tuple(
        Group(
            id=g,
            elements=sum(counts[g].values()),
            elements_by_kind=KindCounts(**counts[g]),
            low=g in assignment.low_groups,
            order=assignment.order.get(g, g),
            solved_low=g in assignment.low_groups,
            operators=tuple(names[g]),
            size=str(grouped.group_size(g)),
            saved_bytes=sum((bytes_of.low if t.id in assignment.low else bytes_of.high)[t.id] for t in saved[g]),
            saved_elements=sum(t.elements for t in saved[g]),
        )
        for g in range(grouped.num_groups)
    )


def _refuse_another_model(plan: Plan, given: Plan) -> None:
    """Raise `PlanError` where two plans have other GEMMs, groups or sites."""
    difference = plan.first_difference(given, there="the given plan", sizes=False)
    if difference is not None:
        raise another_model(difference)
