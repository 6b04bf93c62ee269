"""Find the forward values that backward needs, and the forms in which each value may be kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from fxprec.config.ways import BLOCK_WAYS
from fxprec.numerics.blocks import BlockFormat, find_blocks
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.block_copies import Refusals, wanted_block_formats
from fxprec.passes.analysis.joint import tensor_of, value
from fxprec.passes.analysis.replay.casts import CastKernels
from fxprec.passes.analysis.replay.kernels import Kind, can_repeat, draws, kind_of
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.analysis.saved_bytes import bytes_per_element
from fxprec.passes.analysis.saved_values import is_repeated
from fxprec.passes.analysis.ways import Form
from fxprec.passes.base import Work
from fxprec.passes.crossings.roundoff import amplification, may_cancel
from fxprec.passes.forms.bits import Bits
from fxprec.passes.forms.blocks import Blocks
from fxprec.passes.forms.host import OnHost
from fxprec.passes.forms.low import Low
from fxprec.passes.forms.own import Own


@dataclass(frozen=True)
class Needs:
    """The forward values that backward needs, and the forms in which each may be kept."""

    step: Step
    read_high: set[Node] = field(default_factory=set)
    """Values that backward reads as they are, or that 8 bits would spoil."""
    read_low: set[Node] = field(default_factory=set)
    """Values of which backward reads a low copy, and comparisons with a number, which it may repeat on such a copy."""
    forms: dict[Node, tuple[Form, ...]] = field(default_factory=dict)
    """The forms in which each value may be kept."""
    forced: dict[Node, Form] = field(default_factory=dict)
    """Values that must be kept, with the form: a region's inputs and what its policy saves, values that a rounded copy
    would spoil, and copies in the format that the recipe or a given plan names."""
    comparisons: Collection[Node] = ()
    """Comparisons with a number that backward may repeat on a kept copy of the value."""
    read_as_it_is: set[Node] = field(default_factory=set)
    """Values of which backward reads the value itself, not a copy."""
    refused: dict[Node, str] = field(default_factory=dict)
    """Why a value may be kept in none of the allowed block formats."""
    rows: dict[Node, int] = field(default_factory=dict)
    """The site of each value that has one."""
    peaks: dict[frozenset[tuple[Node, Form]], int] = field(default_factory=dict)
    """The peak of each choice that was replayed, by what it keeps: several searches come to the same choices."""
    amplified: dict[Node, float] = field(default_factory=dict)
    """By how much a recomputation of a value from 8-bit copies enlarges their rounding errors."""

    def amplification(self, node: Node) -> float:
        """Return by how much a recomputation of a value from 8-bit copies enlarges their rounding errors."""
        if node not in self.amplified:
            self.amplified[node] = amplification(node, self._may_be_low, self.step.undecoded)
        return self.amplified[node]

    def may_cancel(self, node: Node) -> bool:
        """Return whether a value is the difference of two values that may be kept in 8 bits, or of parts of one."""
        return may_cancel(node, self._may_be_low, self.step.undecoded)

    def can_repeat(self, node: Node) -> bool:
        """Return whether backward may compute a node again."""
        return node in self.comparisons or can_repeat(node)

    def _may_be_low(self, node: Node) -> bool:
        return any(isinstance(form, Low) for form in self.forms.get(node, ()))


@dataclass
class _Copies:
    """The formats of copies that may replace each value."""

    own: dict[Node, Format | None] = field(default_factory=dict)
    """The format of a copy that replaces a value; None: the value itself is kept."""
    low: dict[Node, Format] = field(default_factory=dict)

    def forbid(self, node: Node) -> None:
        """Allow no copy of a value, so that the value itself is kept."""
        self.own[node] = None
        self.low.pop(node, None)


def needs_of(work: Work) -> Needs:
    """Return the forward values that backward needs, once compute-high has decided who reads stored copies."""
    casts = CastKernels.of(work.settings, work.joint.device)
    step = Step(work.joint, work.settings.processor, work.stepped, casts)
    needs, copies = Needs(step, comparisons=work.comparisons), _Copies()
    hi = work.settings.recipe.hi
    _add_unread(needs, copies, work)
    for node in needs.step.backward:
        for wanted in needs.step.wanted_by(node):
            cast = needs.step.casts.get(wanted)
            if needs.step.undecoded(wanted) in needs.step.checkpointed:
                continue
            if wanted in work.comparisons:
                needs.read_low.add(wanted)
            elif cast is None:
                _need_itself(needs, copies, wanted)
            if cast is None:
                if regions.is_saved(wanted) and not needs.step.needs_no_saving(wanted):
                    needs.forced[wanted] = Own()
                continue
            fmt = parse(cast.format)
            is_low = fmt.bits < hi.bits
            (needs.read_low if is_low else needs.read_high).add(cast.x)
            needs.rows[cast.x] = cast.row
            copies.own[cast.x] = _unless_own(cast.x, hi if is_low else fmt)
            if is_low:
                copies.low[cast.x] = fmt
    _add_starts(needs, copies)
    _add_spoiled(needs, work)
    for node in needs.step.forward:
        if _can_keep(node):
            copies.own.setdefault(node, None)
        elif copies.own.get(node) is None:  # a view of another value: no copy is made of it
            copies.own.pop(node, None)
    _offer(needs, copies, work)
    return needs


def _need_itself(needs: Needs, copies: _Copies, wanted: Node) -> None:
    needs.read_high.add(wanted)
    needs.read_as_it_is.add(wanted)
    copies.forbid(wanted)


def _add_starts(needs: Needs, copies: _Copies) -> None:
    """Keep the inputs of checkpointed regions: forward and its recomputation must read the same value."""
    step = needs.step
    for node in step.checkpointed:
        for source in node.all_input_nodes:
            while is_repeated(source, step.joint) and source not in step.checkpointed:
                source = source.all_input_nodes[0]
            if source not in step.checkpointed and not step.needs_no_saving(source):
                _need_itself(needs, copies, source)
                needs.forced[source] = Own()


def _add_spoiled(needs: Needs, work: Work) -> None:
    """Keep values that 16 bits would spoil, if they would be recomputed from a copy that may be rounded."""
    for node in needs.read_as_it_is:
        tensor = work.grouped.values.get(node)
        reason = None if tensor is None else work.book.reasons_high.get(tensor.id)
        if reason is not None and reason.as_it_is and _comes_from_copies(needs, node):
            needs.forced[node] = Own()


def _comes_from_copies(needs: Needs, node: Node) -> bool:
    seen, stack = set[Node](), list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in needs.rows:
            return True
        if source not in seen:
            seen.add(source)
            stack += source.all_input_nodes
    return False


def _offer(needs: Needs, copies: _Copies, work: Work) -> None:
    """List the forms of each value, those first that serve the most recomputations."""
    blocks = _in_blocks(needs, copies, work)
    movable = _movable(needs, copies) if work.fits_peak else set[Node]()
    if not work.fits_peak:  # the recipe's or plan's block format is used whatever it costs
        needs.forced.update({node: form for node, forms in blocks.items() for form in forms})
    for node, own in copies.own.items():
        is_free = node not in needs.step.returned and node not in needs.forced
        if is_free and Bits.can_hold(tensor_of(node), is_drawn=any(map(draws, node.all_input_nodes))):
            needs.forms[node] = (Bits(),)
            continue
        plain = [Own(own), *([Low(copies.low[node])] if node in copies.low else ())]
        moved = map(OnHost, plain) if node in movable else ()
        needs.forms[node] = (*plain, *moved, *blocks.get(node, ()))


def find_formats(work: Work) -> list[BlockFormat]:
    """Return the block formats that a peak budget may choose: from a given plan, from ``ways``, or from the recipe."""
    if work.given is not None:
        return [find_blocks(name) for name in sorted({site.saved_as for site in work.given.sites} - {""})]
    saved, block_ways = work.settings.recipe.saved, [way for way in work.settings.ways if way in BLOCK_WAYS]
    return [find_blocks(way) for way in block_ways] or (
        [saved] if saved is not None and work.settings.asked.ways is None else []
    )


def _in_blocks(needs: Needs, copies: _Copies, work: Work) -> dict[Node, list[Blocks]]:
    """Return the forms in blocks of each value that backward reads as a single copy."""
    refusals, hi, found = Refusals(work), work.settings.recipe.hi, dict[Node, list[Blocks]]()
    for node, (q, *others) in needs.step.stored.items():
        if others or node in needs.read_as_it_is:
            continue
        site = work.book.sites[needs.rows[node]]
        formats = find_formats(work) if work.fits_peak else wanted_block_formats(work, site, q)
        reasons = {fmt: refusals.of(site, q, fmt) for fmt in formats}
        found[node] = [Blocks(fmt, copies.low.get(node, hi)) for fmt, reason in reasons.items() if reason is None]
        if not found[node]:
            needs.refused[node] = next((f"{f.name} cannot hold it: {why}" for f, why in reasons.items() if why), "")
    return found


def _movable(needs: Needs, copies: _Copies) -> set[Node]:
    """Return the values that may wait in host memory: static, not empty, dense, no output, with at most one copy."""
    found = set[Node]()
    for node in copies.own:
        val = tensor_of(node)
        is_fixed = all(isinstance(n, int) for n in (*val.shape, *val.stride())) and val.numel() > 0
        is_one = len(needs.step.stored.get(node, ())) <= 1 and node not in needs.step.returned
        if is_fixed and is_one and torch.empty_like(val).stride() == val.stride():
            found.add(node)
    return found


def _add_unread(needs: Needs, copies: _Copies, work: Work) -> None:
    """Allow low copies of values that backward does not read, since others may be recomputed from them."""
    recipe, known = work.settings.recipe, set(needs.step.forward)
    for site in work.book.sites:
        node = work.book.values.get(site.id)
        if node not in known or site.kind != "output" or not site.is_unread or node is None:
            continue
        if site.group in work.assignment.low_groups:
            copies.low[node], needs.rows[node] = recipe.format_of(site.kind, low=True), site.id
            copies.own[node] = _unless_own(node, recipe.hi)


def _unless_own(node: Node, fmt: Format) -> Format | None:
    return None if tensor_of(node).dtype.itemsize <= bytes_per_element(fmt) else fmt


def _can_keep(node: Node) -> bool:
    return node.op == "call_function" and value(node) is not None and kind_of(node) not in (Kind.FREE, Kind.VIEW)
