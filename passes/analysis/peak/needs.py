"""What backward asks of forward in a joint graph whose casts are settled, and in which formats it may be kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis.joint import numel_hint, tensor_of, value
from fxprec.passes.analysis.peak.kernels import Kind, bytes_of, kind_of
from fxprec.passes.analysis.peak.step import Step
from fxprec.passes.analysis.saved_bytes import bytes_per_element
from fxprec.passes.base import Work


@dataclass(frozen=True)
class Needs:
    """What backward reads of forward, and how each value may be kept."""

    step: Step
    exactly: set[Node] = field(default_factory=set)
    """Values that backward reads as they are, or that 8 bits would spoil."""
    roughly: set[Node] = field(default_factory=set)
    """Values of which it reads a low copy."""
    high: dict[Node, Format | None] = field(default_factory=dict)
    """The format in which a value may be kept; None: its own dtype."""
    low: dict[Node, Format] = field(default_factory=dict)
    """The format of a low copy, where one may be kept."""
    rows: dict[Node, int] = field(default_factory=dict)
    """The site of a value that has one."""

    def size(self, node: Node, fmt: Format | None) -> int:
        """Return what a value takes in a format."""
        return bytes_of(node) if fmt is None else numel_hint(tensor_of(node)) * bytes_per_element(fmt)


def needs_of(work: Work) -> Needs:
    """Read off who reads what, where the readers of stored copies are settled (`compute_high`)."""
    needs = Needs(Step(work.joint))
    hi = work.settings.recipe.hi
    _add_unread(needs, work)
    for node in needs.step.backward:
        for wanted in needs.step.wanted_by(node):
            cast = needs.step.casts.get(wanted)
            if cast is None:
                needs.exactly.add(wanted)
                needs.low.pop(wanted, None)
                needs.high[wanted] = None
                continue
            fmt = parse(cast.format)
            is_low = fmt.bits < hi.bits
            (needs.roughly if is_low else needs.exactly).add(cast.x)
            needs.rows[cast.x] = cast.row
            needs.high[cast.x] = _unless_own(cast.x, hi if is_low else fmt)
            if is_low:
                needs.low[cast.x] = fmt
    for node in needs.step.forward:
        if _can_keep(node):
            needs.high.setdefault(node, None)
        else:
            needs.high.pop(node, None)
    return needs


def _add_unread(needs: Needs, work: Work) -> None:
    """Let values that backward does not read be kept low: others may be computed again from them."""
    recipe, known = work.settings.recipe, set(needs.step.forward)
    for site in work.book.sites:
        node = work.book.values.get(site.id)
        if node not in known or site.kind != "output" or not site.is_unread or node is None:
            continue
        if site.group in work.assignment.low_groups:
            needs.low[node], needs.rows[node] = recipe.format_of(site.kind, low=True), site.id
            needs.high[node] = _unless_own(node, recipe.hi)


def _unless_own(node: Node, fmt: Format) -> Format | None:
    return None if tensor_of(node).dtype.itemsize <= bytes_per_element(fmt) else fmt


def _can_keep(node: Node) -> bool:
    return node.op == "call_function" and value(node) is not None and kind_of(node) not in (Kind.FREE, Kind.VIEW)
