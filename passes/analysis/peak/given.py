"""The choice that a plan says: which way each value went when it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from fxprec.errors import PlanError
from fxprec.numerics.blocks import AnyFormat, BlockFormat, find_blocks
from fxprec.numerics.formats import parse
from fxprec.passes.analysis.peak.choice import Fit
from fxprec.passes.analysis.peak.costs import Rates
from fxprec.passes.analysis.peak.kernels import can_repeat
from fxprec.passes.analysis.peak.needs import Needs
from fxprec.passes.analysis.peak.overlap import overlap
from fxprec.passes.analysis.peak.problem import FEW, HOST, HOST_LOW, KEEP, NARROW
from fxprec.passes.analysis.peak.step import Held
from fxprec.passes.base import GivenPeak, Work
from fxprec.plan.rows import PeakBytes, Site


def as_given(work: Work, needs: Needs, given: GivenPeak) -> tuple[Fit, PeakBytes]:
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
