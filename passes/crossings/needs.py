"""Find the forward values that backward needs, and the forms in which each value may be kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.block_copies import Refusals
from fxprec.passes.analysis.joint import tensor_of, value
from fxprec.passes.analysis.replay.casts import CastKernels
from fxprec.passes.analysis.replay.kernels import Kind, can_repeat, kind_of
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.analysis.saved_bytes import bytes_per_element
from fxprec.passes.analysis.saved_values import is_repeated
from fxprec.passes.analysis.ways import Demand, Form
from fxprec.passes.base import Work
from fxprec.passes.crossings.roundoff import amplification, may_cancel
from fxprec.passes.forms import FORMS
from fxprec.passes.forms.candidate import Candidate
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
    refused: dict[Node, dict[str, str]] = field(default_factory=dict)
    """Why a value may be kept in none of the forms that were asked for, by their names."""
    rows: dict[Node, int] = field(default_factory=dict)
    """The site of each value that has one."""
    peaks: dict[frozenset[tuple[Node, Form]], int] = field(default_factory=dict)
    """The peak of each choice that was replayed, by what it keeps: several searches come to the same choices."""
    amplified: dict[Node, float] = field(default_factory=dict)
    """By how much a recomputation of a value from 8-bit copies enlarges their rounding errors."""

    def why_refused(self, node: Node) -> str:
        """Return why a value may be kept in none of the forms that were asked for, or ``""``."""
        return next((f"{name} cannot hold it: {why}" for name, why in self.refused.get(node, {}).items()), "")

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
        return any(form.error and Demand.RECOMPUTE_LOW in form.serves for form in self.forms.get(node, ()))


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
    refusals, kinds = Refusals(work), [kind for kind in FORMS if kind.is_asked(work)]
    for node, own in copies.own.items():
        row = needs.rows.get(node)
        value = Candidate(
            node=node,
            step=needs.step,
            work=work,
            refusals=refusals,
            own=own,
            low=copies.low.get(node),
            site=None if row is None else work.book.sites[row],
            is_read_as_it_is=node in needs.read_as_it_is,
            has_form=node in needs.forced,
        )
        needs.forms[node] = _forms_of(value, kinds)
        for form in needs.forms[node]:
            if form.is_used_at_any_cost(work):
                needs.forced[node] = form
        if value.refused:
            needs.refused[node] = value.refused


def _forms_of(value: Candidate, kinds: Sequence[type[Form]]) -> tuple[Form, ...]:
    found = list[Form]()
    for kind in kinds:
        found += kind.offers(value)
        if any(form.replaces_value for form in found):
            break
    return tuple(found)


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
