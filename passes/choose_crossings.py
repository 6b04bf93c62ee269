"""Choose which forward values are saved for backward, and in which form; backward recomputes the others.

The chooser (`passes.crossings`) minimises time. Under a peak budget, predicted memory never exceeds it. Under torch's
``activation_memory_budget``, no more bytes are saved than it allows. Without either, each saved byte has a price.
`crossings.rewrite` rewrites the graph as chosen, and the partition follows the graph.

Two things are not up to the chooser. The user's checkpoints fix what their regions save and recompute. Without a peak
budget, the recipe's or given plan's block format is used for every copy that tolerates it (docs/compute.md, "Fewer than
8 bits").
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fxprec.numerics.formats import parse
from fxprec.passes.analysis.replay.other_sizes import other_sizes
from fxprec.passes.base import GivenPeak, Pass, Work
from fxprec.passes.compute_high import UNREAD
from fxprec.passes.crossings.choice import Chooser
from fxprec.passes.crossings.given_plan import as_given
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.needs import Needs, needs_of
from fxprec.passes.crossings.peak_budget import within_budget
from fxprec.passes.crossings.progress import Progress
from fxprec.passes.crossings.rewrite import Rewrite
from fxprec.passes.crossings.saved_share import is_above, within_share
from fxprec.passes.crossings.without_budget import without_budget
from fxprec.passes.forms import FORMS
from fxprec.passes.forms.blocks import Blocks
from fxprec.passes.forms.low import Low
from fxprec.passes.forms.own import Own
from fxprec.passes.notice import Notice, readable


@dataclass(frozen=True)
class ChooseCrossings(Pass):
    """Choose a way for each value that backward needs; under a peak budget fill ``work.peak`` and ``peak_sizes``."""

    name: str = "choose-crossings"

    def apply(self, work: Work) -> None:
        if work.fits_peak:
            _fit_peak(work)
        elif work.joint.tangents:
            _choose(work)
        else:
            _notice_wanted_blocks(work, {})


def _choose(work: Work) -> None:
    problem, share = without_budget(work, needs_of(work)), work.memory_budget
    needs, default = problem.needs, Chooser(problem).unlimited
    fit = default if share == 1 else within_share(problem, default, share)
    if is_above(fit, default):
        work.notices.append(_holds_more(share, fit, default))
    Rewrite(work, needs, fit).rewrite()
    work.has_crossings = True
    _record(work, needs, fit)


def _holds_more(share: float, fit: Fit, default: Fit) -> Notice:
    return Notice(
        f"activation_memory_budget={share:g}",
        f"{readable(fit.waiting)} wait for backward, and {readable(default.waiting)} without it, but backward "
        f"recomputes much at once: the step holds {readable(fit.peak)}, and {readable(default.peak)} without it. Give "
        "peak_budget, which bounds what the step holds",
    )


WHY_RECOMPUTED = f"{UNREAD}: it is recomputed in backward, which takes less time than storing it"
WHY_KEPT = f"{UNREAD}: backward reads the value itself as well"


def _record(work: Work, needs: Needs, fit: Fit) -> None:
    """Update the sites of values that are kept in another form than their row says, or recomputed."""
    sites, hi = work.book.sites, work.settings.recipe.hi
    repeated = {node for node, _ in fit.replay.repeated}
    for node, row in needs.rows.items():
        form, why = fit.replay.kept.get(node), needs.why_refused(node)
        if isinstance(form, Blocks):
            sites[row] = replace(sites[row], saved_as=form.way)
        elif why and not sites[row].why:
            sites[row] = replace(sites[row], why=why)
        if isinstance(form, Low) and sites[row].is_unread:
            sites[row] = replace(sites[row], format=form.format.name, reads="backward", why="", unread=False)
        elif isinstance(form, Own) and parse(sites[row].format).bits < hi.bits:
            work.book.leave_high(row, WHY_KEPT)
        elif form is None and node in repeated:
            work.book.leave_high(row, WHY_RECOMPUTED)
    _notice_wanted_blocks(work, {row: needs.refused.get(node, {}) for node, row in needs.rows.items()})


def _notice_wanted_blocks(work: Work, refused: Mapping[int, Mapping[str, str]]) -> None:
    """Add a notice for each tensor that only the given plan stores otherwise; ``refused`` has reasons, by site."""
    if work.given is None:
        return
    for site in work.book.sites:
        given = work.given.sites[site.id]
        name, entry = given.saved_as or given.form, "saved_as" if given.saved_as else "form"
        if not name or site.saved_as:
            continue
        why = refused.get(site.id, {}).get(name)
        if not given.saved_as:
            why = "only plans of a peak budget encode values so"
        elif not why:
            why = "no 8-bit copy of it is saved for backward alone" + (f", since {site.why}" if site.why else "")
        detail = f"sites[{site.id}].{entry} of the given plan is {name!r}, and it stays in {site.format}: {why}"
        work.notices.append(Notice(f"{site.tensor} ({site.module})" if site.module else site.tensor, detail))


def _fit_peak(work: Work) -> None:
    goal = work.peak_goal
    assert goal is not None, "asked by fits_peak"
    needs, progress = needs_of(work), Progress()
    try:
        with _known_objects_frozen():
            fit, work.peak = (
                as_given(work, needs, goal)
                if isinstance(goal, GivenPeak)
                else within_budget(work, needs, goal, progress)
            )
    finally:
        progress.end()
    work.peak_sizes = other_sizes(fit.replay, work.joint.graph, work.peak.room - work.peak_part.beyond)
    Rewrite(work, needs, fit).run()
    work.has_crossings = True
    work.remarks.append(_remark(needs, fit))
    _remark_shared(work)
    _notice_unused(work, needs)
    if work.peak_sizes is not None:
        work.remarks.append(work.peak_sizes.note())


@contextmanager
def _known_objects_frozen() -> Iterator[None]:
    """Hide from the garbage collector what exists already, unless the user froze objects; new objects are collected.

    Replays make so many objects that the collector would search all graphs and modules every few replays.
    """
    is_theirs = gc.get_freeze_count() > 0
    if not is_theirs:
        gc.freeze()
    try:
        yield
    finally:
        if not is_theirs:
            gc.unfreeze()


def _remark_shared(work: Work) -> None:
    """Add a remark about the graphs that share the budget."""
    part = work.peak_part
    if part.is_provisional:
        work.remarks.append(
            "peak budget: in the first step graphs are planned one by one, so this graph is planned for its lowest peak"
        )
    elif part.is_cut:
        work.remarks.append(
            "peak budget: a graph break ends this graph, and the code after it, which is not planned here, shares the "
            "budget"
        )
    elif part.num_graphs > 1:
        assert part.budget is not None, "graphs that share have a budget to share"
        work.remarks.append(
            f"peak budget: {part.num_graphs} graphs of the step share {readable(part.budget)}; while this graph runs, "
            f"the others hold {readable(part.beside)} of saved tensors and gradients, and this graph may save at most "
            f"{readable(int(part.waiting))}"
        )


def _notice_unused(work: Work, needs: Needs) -> None:
    """Add a notice for each name of ``ways`` that asks for a form which no value may have."""
    if work.given is not None:
        return
    offered = {form.way for forms in needs.forms.values() for form in forms}
    for kind in FORMS:
        for way in kind.ways:
            if way in work.settings.ways and way not in offered:
                why = next((reasons[way] for reasons in needs.refused.values() if way in reasons), "")
                first = f"for the first value, {why}" if why else kind.missing
                work.notices.append(Notice(f"ways {way!r}", f"no value of this graph can be kept so: {first}"))


def _remark(needs: Needs, fit: Fit) -> str:
    repeated = sum(n in needs.forms for n, _ in fit.replay.repeated)
    counts = Counter(form.counted for form in fit.replay.kept.values())
    words = (Own.counted, Low.counted, *sorted(counts.keys() - {Own.counted, Low.counted}))
    said = ", ".join(f"{counts[word]} {word}" for word in words)
    return f"peak budget: {said.replace(' ', ' values are ', 1)}, {repeated} recomputed in backward"
