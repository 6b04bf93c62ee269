"""Explain a plan in sentences: a tensor's precision, the readers of its stored copy, the lowering of the graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from fxprec.config.ways import WAYS_SAID
from fxprec.errors import PlanError, did_you_mean
from fxprec.numerics.blocks import find_blocks
from fxprec.numerics.formats import Format, parse
from fxprec.plan.lines import named, one_line, place
from fxprec.plan.rows import HalfLowering, LoweringChoice, LoweringEstimate, PeakBytes, WholeStep
from fxprec.plan.saved_tensors import lines as saved_tensor_lines
from fxprec.plan.shown import line

if TYPE_CHECKING:
    from fxprec.plan.plan import Plan
    from fxprec.plan.rows import SavedTensor, Site


def explain(plan: Plan, tensor: str) -> list[str]:
    """Return the lines on every site of a tensor or, if no tensor has that name, of a module or a site's number.

    A module includes those inside it. Of a tensor that is saved without a site, the lines tell its bytes and its dtype.

    ``lowering`` explains which lowering ``"auto"`` took. ``peak_budget`` and ``step_budget`` list the bytes of the step
    under that budget. A plan without them says why it has none. ``""`` gives an overview of the whole plan: each tensor
    saved for backward, the groups, and the other names.

    Raises `PlanError` for a name that the plan does not have.
    """
    if not tensor:
        return [one_line(line([plan])), *map(one_line, saved_tensor_lines(plan)), _MORE]
    for name in ("tensor", "module", "id"):
        found = [site for site in plan.sites if str(getattr(site, name)) == tensor]
        if found:
            return [line for site in found for line in _site(plan, site)]
    if inside := [site for site in plan.sites if site.module.startswith(f"{tensor}.")]:
        return [line for site in inside for line in _site(plan, site)]
    if saved := [row for row in plan.saved if row.tensor == tensor]:
        return [_without_site(row) for row in saved]
    if tensor == "lowering":
        return [_NO_LOWERING] if plan.lowering is None else lowering_lines(plan.lowering)
    if tensor == "peak_budget":
        return [_NO_PEAK] if plan.peak_bytes is None else peak_lines(plan, plan.peak_bytes)
    if tensor == "step_budget":
        return [_NO_STEP] if plan.whole_step is None else step_lines(plan, plan.whole_step)
    known = {s.tensor for s in plan.sites} | {s.module for s in plan.sites if s.module} | {s.tensor for s in plan.saved}
    raise PlanError(
        f"{tensor!r} is not a tensor or module of this plan{did_you_mean(tensor, sorted(known))}; plan.sites and the "
        "dump's texts list them"
    )


_MORE = "for more: fxprec explain PLAN NAME, with a tensor, a module, lowering, peak_budget or step_budget as NAME"
_NO_LOWERING = (
    "lowering: this plan records no choice of lowering='auto': it was made without compiling (fxprec dump), or "
    "lowering= is not 'auto'; after a training step save backend.plans[0], which has it"
)
_NO_PEAK = "peak_budget: none was asked for; plan with peak_budget='60%' or bytes such as '12GiB'"
_NO_STEP = "step_budget: none was asked for; compile with options optimizer and step_budget='12GiB'"


def lowering_lines(choice: LoweringChoice) -> list[str]:
    """Return lines on the chosen lowering, the reason, and the estimates for each half."""
    estimate = choice.estimate or LoweringEstimate()
    halves = [(name, half) for name in ("forward", "backward") if (half := getattr(estimate, name)) is not None]
    return [
        one_line(f"lowering {choice.asked!r} took {_TAKEN[choice.chosen]}: {choice.why}"),
        *(f"  {name}, {half.chosen}: {_estimated(half)}" for name, half in halves),
    ]


def peak_lines(plan: Plan, peak: PeakBytes) -> list[str]:
    """Return lines on a peak budget: its bytes, the graphs that share it, the step's peak, and values by way."""
    ways = Counter(_way(site) for site in plan.sites if site.way)
    compiled = "" if peak.compiled is None else f", {peak.compiled:,} as compiled"
    return [
        f"peak_budget {peak.budget:,} bytes{_shared(peak)}",
        f"  at its peak the step holds {peak.planned:,} bytes as predicted{compiled}; {peak.high:,} with everything "
        "kept in high precision",
        f"  of values that backward needs, {', '.join(f'{count} are {way}' for way, count in ways.items()) or 'none'}"
        f"; {len(peak.kept)} without a site are kept"
        + (f", {len(peak.offloaded)} are in host memory" if peak.offloaded else ""),
    ]


def step_lines(plan: Plan, whole: WholeStep) -> list[str]:
    """Return lines on a step budget: the bytes of weights, optimizer states, gradients and the peak."""
    chosen = f", in {whole.chosen}: states='auto', and no more exact form fits" if whole.chosen else ""
    if whole.chosen == "float32":
        chosen = ", in float32: states='auto', and they fit"
    return [
        f"step_budget {whole.budget:,} bytes",
        f"  weights and buffers take {whole.weights:,}",
        f"  optimizer states take {whole.states:,}{chosen}",
        *([f"  gradients, summed in bf16, take {whole.gradients:,}"] if whole.gradients else []),
        *(() if plan.peak_bytes is None else (f"  {line}" for line in peak_lines(plan, plan.peak_bytes))),
    ]


def _shared(peak: PeakBytes) -> str:
    if peak.graphs == 1:
        return ""
    return f" shared by {peak.graphs} graphs of the step, {peak.room:,} of it for this one"


def _way(site: Site) -> str:
    has_format = site.way in ("narrow", "offload")
    return WAYS_SAID[site.way] + (f" in {site.held_as}" if has_format else "")


_TAKEN = {
    "inductor": "Inductor's own kernels",
    "triton": "generated Triton kernels",
    "mixed": "generated Triton kernels in one half and Inductor's own in the other",
}


def _estimated(half: HalfLowering) -> str:
    ways = (("Inductor's", half.inductor), ("generated", half.triton))
    return "; ".join(
        f"{name} {moved.launches} launches, {moved.bytes / 1e9:.4g} GB, {moved.seconds * 1e3:.3g} ms"
        for name, moved in ways
    )


def _site(plan: Plan, site: Site) -> list[str]:
    about = place(site.kind, f"site {site.id}", site.shape, site.module, site.source)
    head = f"{named(site.tensor, about)}: {site.held_as}"
    return [one_line(head), *(f"  {one_line(reason)}" for reason in reasons(plan, site))]


def _without_site(row: SavedTensor) -> str:
    about = ", ".join(part for part in (row.module, row.source) if part)
    return one_line(
        f"{row.tensor}{f' ({about})' if about else ''}: {row.bytes:,} bytes in {row.format}, saved unchanged, since no "
        "pass may round it: a mask, an index, a divisor, a statistic or log-softmax's result"
    )


def reasons(plan: Plan, site: Site) -> list[str]:
    """Return sentences on a site's group, on the reason for its format, and on the readers of its stored copy."""
    return [_of_group(plan, site), _of_format(plan, site), *_of_readers(plan, site), *_of_operands(plan, site)]


def _of_operands(plan: Plan, site: Site) -> list[str]:
    """Return a sentence on the operand formats of the GEMM that makes a site's value, if the recipe rounds operands."""
    made_by = [gemm for gemm in plan.gemms if gemm.node == site.tensor and site.kind == "output"]
    if plan.recipe.operands is None or not made_by:
        return []
    (gemm,) = made_by
    products = {"its value": gemm.forward, "its input's gradient": gemm.input_grad, "its weight's": gemm.weight_grad}
    rounded = [f"{fmt} for {product}" for product, fmt in products.items() if fmt]
    why = f": {gemm.operands_why}" if gemm.operands_why else ""
    if not rounded:
        return [f"GEMM {gemm.id} multiplies operands in {plan.recipe.hi.name}{why}"]
    return [f"GEMM {gemm.id} rounds its operands to blocks, {', '.join(rounded)}{why}"]


def _of_group(plan: Plan, site: Site) -> str:
    group = plan.groups[site.group]
    asked = (
        f"peak_budget {plan.peak_bytes.budget}{_shared(plan.peak_bytes)}"
        if plan.peak_bytes is not None
        else f"activation_budget {plan.activation_budget}"
        if plan.activation_budget is not None
        else f"low_ratio {plan.requested_low_ratio}"
    )
    return (
        f"group {group.id} of {len(plan.groups)}, {group.elements:,} elements, is {'low' if group.low else 'high'}: "
        f"number {group.order + 1} in the order of policy {plan.policy!r}, which reached {plan.achieved_low_ratio:.4g} "
        f"for {asked}"
    )


def _of_format(plan: Plan, site: Site) -> str:
    group = plan.groups[site.group]
    low, high = (_stored(plan.recipe.format_of(site.kind, low=is_low), site) for is_low in (True, False))
    if site.promoted_at is not None:
        return f"it overflowed and was promoted to {site.format} at step {site.promoted_at}, for good"
    if site.why and site.format == low and group.low:
        return f"recipe {plan.recipe.name!r} holds a low {site.kind} in {low}; {site.why}"
    if site.why:
        other = high if site.format not in (low, high) and not group.low else low
        return f"{site.format} and not {other}, since {site.why}"
    if site.kind == "grad_param":
        return f"a parameter's gradient always has the recipe's weight_grad format, {low}"
    if site.format == low and group.low:
        return f"recipe {plan.recipe.name!r} holds a low {site.kind} in {low}"
    if site.format == high and group.low:
        return "its group is low, but keep_high (or a plan given) holds this tensor high"
    if site.format == high:
        return f"recipe {plan.recipe.name!r} holds a high {site.kind} in {high}"
    if site.format == low:
        return "its group is not low as a whole; the policy chose this tensor alone"
    return "neither format of the recipe: the plan was edited"


def _stored(fmt: Format, site: Site) -> str:
    """Return the format's name, or its saturating variant's name if the site has that variant."""
    saturating = replace(fmt, overflow="saturate").name
    return saturating if site.format == saturating else fmt.name


def _of_readers(plan: Plan, site: Site) -> list[str]:
    if plan.storage == "simulate":
        return []
    if site.reads == "gemm codes":
        return ["GEMMs multiply the codes of the stored copy, and backward reads it; all else reads the value itself"]
    if site.reads == "all":
        return ["every reader gets this one value: there is no second copy"]
    if site.form:
        return [f"backward reads what {site.form!r} makes of the value, and no copy in {site.format}"]
    if site.saved_as:
        blocks = find_blocks(site.saved_as)
        said = (
            "reads it only where rounding noise of mean 0 leaves the mean of gradients unchanged"
            if blocks.bits < 8
            else "reads it"
        )
        return [
            f"backward {said}: it is stored in {site.saved_as}, {blocks.bits_per_element:g} bits an element, scales "
            f"included{', rounded at random' if blocks.bits < 8 else ''}, and not in {site.format}"
        ]
    fmt = parse(site.format)
    if fmt == plan.recipe.hi and fmt.bits == 16 and fmt.torch_dtype is not None:
        return ["backward reads the stored copy, and so does any forward GEMM, which multiplies that format anyway"]
    return ["backward reads the stored copy; forward, and what leaves the graph, is the value itself"]
