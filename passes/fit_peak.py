"""Keep, narrow or compute again what backward needs, so that the step never holds more than ``peak_budget``.

The choice is `analysis.peak`'s, `casts.ways` makes it real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from fxprec.config.config import BLOCK_WAYS
from fxprec.config.settings import PeakBudget
from fxprec.errors import BudgetError, PlanError
from fxprec.numerics.blocks import AnyFormat, BlockFormat, find_blocks
from fxprec.numerics.formats import parse
from fxprec.passes.analysis.peak.choice import Chooser, Fit
from fxprec.passes.analysis.peak.costs import Rates
from fxprec.passes.analysis.peak.either import Either
from fxprec.passes.analysis.peak.kernels import can_repeat
from fxprec.passes.analysis.peak.needs import Needs, find_formats, needs_of
from fxprec.passes.analysis.peak.other_sizes import other_sizes
from fxprec.passes.analysis.peak.overlap import overlap
from fxprec.passes.analysis.peak.problem import FEW, HOST, HOST_LOW, KEEP, NARROW, Problem, is_on_host
from fxprec.passes.analysis.peak.progress import Progress
from fxprec.passes.analysis.peak.reserve import enough_for, reserved
from fxprec.passes.analysis.peak.step import Held
from fxprec.passes.base import GivenPeak, Work
from fxprec.passes.casts.apart import lay_apart
from fxprec.passes.casts.narrow_sums import narrow_sums
from fxprec.passes.casts.two_gradients import part_gradients
from fxprec.passes.casts.upsampled import sum_upsampled
from fxprec.passes.casts.ways import Rewrite
from fxprec.passes.notice import Notice, readable
from fxprec.plan.rows import PeakBytes, PeakPoint, Site

_MOMENTS = 40  # drawn of each other budget


@dataclass(frozen=True)
class FitPeak:
    """Choose a way for each value that backward needs; fill ``work.peak``."""

    name: str = "fit-peak"

    def apply(self, work: Work) -> None:
        goal = work.peak_goal
        if goal is None:
            return
        lay_apart(work)
        part_gradients(work.joint.graph)
        sum_upsampled(work.joint.graph)
        narrow_sums(work)
        needs, progress = needs_of(work), Progress()
        try:
            found = _given(work, needs, goal) if isinstance(goal, GivenPeak) else _solved(work, needs, goal, progress)
        finally:
            progress.end()
        fit, work.peak = found
        work.peak_sizes = other_sizes(fit.held, work.joint.graph, work.peak.room - work.peak_part.beyond)
        Rewrite(work, needs, fit).run()
        work.is_cut = True
        work.remarks.append(_remark(needs, fit))
        _tell_of_graphs(work)
        _tell_unused(work, needs)
        if work.peak_sizes is not None:
            work.remarks.append(work.peak_sizes.note())


def _tell_of_graphs(work: Work) -> None:
    """Say whom the budget is shared with."""
    part = work.peak_part
    if part.is_provisional:
        work.remarks.append(
            "peak budget: the first step knows its graphs one by one, and this one holds the least there"
        )
    elif part.is_cut:
        work.remarks.append("peak budget: a graph break ends this graph, and what follows, not planned here, shares it")
    elif part.num_graphs > 1:
        assert part.budget is not None, "graphs that share have a budget to share"
        work.remarks.append(
            f"peak budget: {readable(part.budget)} are shared by {part.num_graphs} graphs of the step; while this one "
            f"runs, {readable(part.beside)} of others wait or are gradients, and of it at most "
            f"{readable(int(part.waiting))} wait"
        )


def _tell_unused(work: Work, needs: Needs) -> None:
    """Say which block formats of ``ways`` no value may be kept in."""
    borne = {fmt for formats in needs.few.values() for fmt in formats}
    for fmt in find_formats(work) if work.given is None and set(work.settings.ways) & set(BLOCK_WAYS) else ():
        if fmt not in borne:
            why = next(iter(filter(None, needs.refused.values())), "backward reads no copy in 8 bits")
            work.notices.append(
                Notice(f"ways {fmt.name!r}", f"no value of this graph may be kept in it; for one, {why}")
            )


def _solved(work: Work, needs: Needs, asked: PeakBudget, progress: Progress) -> tuple[Fit, PeakBytes]:
    """Choose for the budget. Raises `BudgetError` where none is found."""
    device = work.joint.table.meta["val"].device
    part, rates = work.peak_part, Rates.of(device)
    high = Chooser(Problem(needs, rates, ())).unlimited
    chooser = Either.of(needs, rates, work.settings.ways, progress)
    budget = asked.bytes_of(high.peak) if part.budget is None else part.budget
    offers = part.shares or part.wants_curve  # to other graphs
    fits = chooser.curve(waiting=offers) if offers or work.looks_at_budgets else ()
    if part.is_provisional and asked.is_share:
        budget = max(budget, fits[-1].peak)  # of all graphs' together it will be a share
    free = 0 if asked.is_share else reserved(device, budget)
    bound = part.bound(budget, free)
    fit = fits[-1] if part.is_provisional else chooser.within(bound)
    if fit is None or fit.excess(bound) > 0:
        fit = min((chooser.least(), *fits), key=lambda fit: fit.peak)
        if fit.excess(bound) > 0:
            raise _out_of_reach(budget, fit.peak + part.beside + part.beyond, free, work, fit)
    sited = needs.rows.keys()
    moved = fit.held.moved
    kept = tuple(node.name for node in fit.held.saved if node not in sited and node not in moved)
    seconds = rates.step(needs.step)
    peak = PeakBytes(
        budget=budget,
        high=high.peak,
        planned=fit.peak + part.beyond,
        live=fit.held.live_by_kind(),
        kept=kept,
        offloaded=tuple(node.name for node in fit.held.saved if node not in sited and node in moved),
        graphs=part.num_graphs,
        beside=part.beside,
        reserved=free,
        waiting=fit.waiting + part.beyond_waiting,
        seconds=seconds + fit.seconds,
        points=tuple(_point(found, seconds) for found in (high, *fits)) if fits else (),
    )
    return fit, peak


def _point(fit: Fit, seconds: float) -> PeakPoint:
    live = fit.held.live_by_kind(_MOMENTS)
    return PeakPoint(peak=fit.peak, waiting=fit.waiting, seconds=seconds + fit.seconds, live=live)


def _given(work: Work, needs: Needs, given: GivenPeak) -> tuple[Fit, PeakBytes]:
    """Follow a plan's ways. Raises `PlanError` where they leave out what backward needs."""
    saved: dict[Node, AnyFormat | None] = {}
    moved, hi = set[Node](), work.settings.recipe.hi
    nodes = {row: node for node, row in needs.rows.items()}
    for site in given.sites:
        node = nodes.get(site.id, work.book.values.get(site.id))
        if node in needs.high and site.way in ("keep", "narrow", "offload"):
            is_low = site.way == "narrow" or (site.way == "offload" and parse(site.format).bits < hi.bits)
            is_low = is_low and site.promoted_at is None
            saved[node] = needs.low.get(node, needs.high[node]) if is_low else needs.high[node]
            if is_low and site.saved_as:
                saved[node] = _given_blocks(needs, node, site)
            if site.way == "offload":
                _refuse_moved(needs, node, saved[node], f"sites[{site.id}].way ({site.tensor})")
                moved.add(node)
    kept, offloaded = (frozenset(names) for names in (given.peak.kept, given.peak.offloaded))
    saved |= dict.fromkeys(node for node in needs.high if node.name in kept | offloaded)
    for node in needs.high:
        if node.name in offloaded:
            _refuse_moved(needs, node, None, f"peak_bytes.offloaded ({node.name})")
            moved.add(node)
    held = Held(needs.step, saved, moved)
    for node, _ in held.repeated:
        if node not in needs.step.decoded and not can_repeat(node):
            raise PlanError(
                f"the given plan leaves out {node.name}, which backward needs and which cannot be computed again; give "
                "its site the way 'keep', or plan again"
            )
        _refuse_sources_in_blocks(needs, node, saved)
    overlap(held, Rates.of(work.joint.table.meta["val"].device), work.peak_part.bound(given.peak.budget).peak)
    fit = Fit(held, {node: _way_of(needs, node, fmt, node in moved) for node, fmt in saved.items()}, 0.0)
    return fit, replace(given.peak, planned=held.peak, live=held.live_by_kind())


def _way_of(needs: Needs, node: Node, fmt: AnyFormat | None, is_moved: bool) -> int:
    if isinstance(fmt, BlockFormat):
        return FEW + needs.few[node].index(fmt)
    is_low = fmt is not None and fmt is needs.low.get(node)
    return (HOST_LOW if is_low else HOST) if is_moved else NARROW if is_low else KEEP


def _refuse_moved(needs: Needs, node: Node, fmt: AnyFormat | None, entry: str) -> None:
    """Raise `PlanError` where a given plan has a value wait in host memory that cannot, or in a block format."""
    if node in needs.movable and not isinstance(fmt, BlockFormat):
        return
    why = f"in {fmt.name} it stays on the device" if isinstance(fmt, BlockFormat) else _STAYS
    raise PlanError(f"{entry} of the given plan is 'offload', and {why}; give it the way 'keep', or plan again")


_STAYS = "a value stays on the device whose size is dynamic, which is an output, or which lies with gaps"


def _given_blocks(needs: Needs, node: Node, site: Site) -> BlockFormat:
    """Return the block format that a given plan keeps a value in. Raises `PlanError` where it may not."""
    fmt = find_blocks(site.saved_as)
    # Where nothing but its mask is read, the plan says so.
    found = next((few for few in needs.few.get(node, ()) if few == fmt), None)
    if found is None:
        why = needs.refused.get(node) or f"{fmt.name} is no choice: backward reads it elsewhere than as a low copy"
        raise PlanError(
            f"sites[{site.id}].saved_as ({site.tensor}) of the given plan is {fmt.name!r}: {why}; take saved_as out, "
            "or plan again"
        )
    return found


def _refuse_sources_in_blocks(needs: Needs, repeated: Node, saved: Mapping[Node, AnyFormat | None]) -> None:
    """Raise `PlanError` where a given plan computes a value again from one that it keeps in blocks."""
    for source in map(needs.step.shown, repeated.all_input_nodes):
        fmt = saved.get(source)
        if isinstance(fmt, BlockFormat) and repeated not in needs.step.decoded:
            raise PlanError(
                f"the given plan keeps {source.name} in {fmt.name}, and has {repeated.name} computed again from it, "
                "whose error would not average out; keep one of the two in 8 bits or more"
            )


def _remark(needs: Needs, fit: Fit) -> str:
    repeated = sum(n in needs.high for n, _ in fit.held.repeated)
    narrow, few = (sum(way == NARROW for way in fit.ways.values()), sum(way >= FEW for way in fit.ways.values()))
    moved = sum(is_on_host(way) for way in fit.ways.values())
    kept, blocks = len(fit.held.saved) - narrow - few - moved, f"{few} in blocks, " if few else ""
    blocks += f"{moved} in host memory, " if moved else ""
    return (
        f"peak budget: {kept} values are kept, {narrow} kept in 8 bits, {blocks}{repeated} computed again in backward"
    )


def _out_of_reach(budget: int, least: int, free: int, work: Work, fit: Fit) -> BudgetError:
    enough = enough_for(least - budget + free, budget) if free else least
    ways = [f"raise it to {readable(enough)}", "take a smaller batch"]
    if "recompute" not in work.settings.ways:
        ways.append("add 'recompute' to ways")
    if "narrow" not in work.settings.ways:
        ways.append("add 'narrow' to ways")
    elif not work.settings.recipe.has_low:
        ways.append(f"choose a recipe with a low format ({work.settings.recipe.name!r} has none)")
    left = f", {readable(free)} of it left free for libraries" if free else ""
    return BudgetError(
        f"peak_budget is {readable(budget)}{left}, and the least peak found holds {readable(least)}, "
        f"{_what_holds(fit)} among them; {', '.join(ways[:-1])} or {ways[-1]}"
    )


def _what_holds(fit: Fit) -> str:
    """Name the largest tensors that live at the peak, and what takes most of it."""
    timeline, held = fit.held.timeline, fit.held
    peak = max(range(len(timeline.live)), key=timeline.live.__getitem__)
    living = [i for i, born in timeline.born.items() if born <= peak <= timeline.dies[i]]
    largest = sorted(living, key=lambda i: -held.items[i].bytes)[:3]
    return ", ".join(f"{held.anchors[i].name} ({readable(held.items[i].bytes).partition(' (')[0]})" for i in largest)
