"""Replay a training step under one choice of ways: which tensors are in memory, and when (`Replay`).

Backward reads forward values. A value that was saved, as it is or as a copy in some format, is read from memory. Any
other value is recomputed when backward first needs it, from operands that are saved or recomputed in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import sympy
import torch
from torch.fx import Node

from fxprec.numerics.bits import Bit
from fxprec.numerics.blocks import WHOLE_BITS, AnyFormat, BlockFormat
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.joint import numel_expr, numel_hint, tensor_of, value
from fxprec.passes.analysis.ops import CASTS
from fxprec.passes.analysis.replay.kernels import Kind, result_bytes
from fxprec.passes.analysis.replay.loops import Item
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.analysis.replay.timeline import Timeline
from fxprec.passes.analysis.saved_bytes import stored_bytes
from fxprec.passes.analysis.ways import Form
from fxprec.plan.rows import LIVE

_MOMENTS = 100
_T = TypeVar("_T")
Kept = Mapping[Node, Form]
"""The values that are kept for backward, with their forms."""


def drawn(moments: Sequence[_T], size: Callable[[_T], int], most: int = _MOMENTS) -> tuple[_T, ...]:
    """Split a step into at most ``most`` stretches; return the moment of the largest ``size`` from each."""
    stretch = -(-len(moments) // most) or 1
    return tuple(max(moments[i : i + stretch], key=size) for i in range(0, len(moments), stretch))


def _growth(node: Node) -> sympy.Expr:
    """Return the factor by which a value's bytes grow with the dynamic dimensions: 1 at the traced sizes."""
    val = value(node)
    return sympy.Integer(1) if val is None or not numel_hint(val) else numel_expr(val) / numel_hint(val)


@dataclass
class Replay:
    """The tensors in memory during a step under one choice: one item for each node that runs or is repeated."""

    step: Step
    kept: Kept
    items: list[Item] = field(default_factory=list)
    at: dict[Node, int] = field(default_factory=dict)  # node -> its item in its own half
    copies: dict[Node, int] = field(default_factory=dict)  # value -> item of its stored copy
    offloads: dict[Node, int] = field(default_factory=dict)  # value -> item that moves it to host memory
    reloads: dict[Node, int] = field(default_factory=dict)  # value -> item that moves it back
    decoded: dict[Node, list[int]] = field(default_factory=dict)  # value -> items that its copy is decoded to
    reloaded: list[tuple[Node, Node]] = field(default_factory=list)  # (value, backward node before which it comes back)
    sent: dict[Node, Node] = field(default_factory=dict)  # value -> forward node behind which its copy out is done
    fetched: dict[Node, Node] = field(default_factory=dict)  # value -> backward node before which its copy back begins
    read_from: dict[Node, int] = field(default_factory=dict)  # value -> item from which backward reads it
    repeated: list[tuple[Node, Node]] = field(default_factory=list)  # (node, backward node before which it runs again)
    made: list[Node] = field(default_factory=list)  # for each item its value, or the value that it copies
    anchors: list[Node] = field(default_factory=list)  # for each item the node of its half before or at which it runs
    _conversions: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)  # of recomputed items, to a dtype

    def __post_init__(self) -> None:
        unread = self._unread()
        for node in self.step.forward:
            if node not in unread:
                self._run_forward(node)
        self.border = len(self.items)
        backward, found = self.step.backward_set, self.read_from
        for node in self.step.backward:
            reads = [
                self.at[n] if n in backward else found[n] if n in found else self._find(n, node)
                for n in self.step.operands[node]
            ]
            self.at[node] = self._add(node, reads, node)
            for parameter, gradient in self.step.updates.get(node, ()):
                workspace = self.step.workspace_of_stepping(parameter)
                reads, writes = [self.at[gradient]], self.at[parameter]
                self._append(Item(Kind.EXTERN, 0, reads, workspace=workspace, writes=writes), node, gradient)
        for x in {x for node, _ in self.repeated for x in self.step.operands[node]} & self.step.copied.keys():
            if self.step.may_wait_itself(x):
                self._let_wait(x)
        self.timeline = Timeline(self.items, self.border)

    def _unread(self) -> set[Node]:
        """Return the forward nodes that neither forward's results nor kept values depend on: they are not compiled."""
        found = set[Node]()
        for node in reversed(self.step.aside):
            if node not in self.kept and all(user in found or user in self.step.backward_set for user in node.users):
                found.add(node)
        return found

    def _run_forward(self, node: Node) -> None:
        if self._is_copy(node):
            self.at[node] = self._append(Item(Kind.VIEW, 0, [self.copies[self.step.operands[node][0]]]), node, node)
            return
        sources, at = self.step.undecoded_operands[node], self.at
        reads = [at[source] for source in sources if source in at]  # all but sizes of decoded copies
        form = self.kept.get(node)
        is_moved = form is not None and form.is_on_host
        is_stored = form is not None and form.format is None and not is_moved
        self.at[node] = self._add(node, reads, node, is_stored=is_stored)
        fmt = self._format(node)
        if fmt is not None:
            val = tensor_of(node)
            size = stored_bytes(fmt, val) if form is None else form.num_bytes(val)
            copy = Item(self._cast_kind(fmt, form), size, [self.at[node]], is_stored=not is_moved, is_aligned=True)
            self.copies[node] = self._append(copy, node, node)
            if form is not None and form.replaces_value:
                read = Item(Kind.FUSED, result_bytes(node), [self.copies[node]])
                self.at[node] = self._append(read, node, node)
        if is_moved:
            leaves = Item(Kind.EXTERN, 0, [self.copies.get(node, self.at[node])], is_stored=True)
            self.offloads[node] = self._append(leaves, node, node)

    def _cast_kind(self, fmt: AnyFormat | Bit, form: Form | None) -> Kind:
        """Return how a copy is written, and how it is read back."""
        if form is not None and form.kernel is not Kind.FUSED:
            return form.kernel
        return self.step.cast_kernels.kind(fmt)

    def _format(self, node: Node) -> AnyFormat | Bit | None:
        """Return the format of a value's copy that waits for backward, or None."""
        return self.kept[node].format if node in self.kept else self.step.copied.get(node)

    def _is_copy(self, node: Node) -> bool:
        """Return whether a conversion equals the stored copy of its operand, so that Inductor computes both once."""
        fmt = self._format(self.step.operands[node][0]) if node.target in CASTS else None
        return isinstance(fmt, Format) and fmt.bits > 8 and fmt.torch_dtype is tensor_of(node).dtype

    def _add(
        self, node: Node, reads: list[int], anchor: Node, *, is_stored: bool = False, is_repeat: bool = False
    ) -> int:
        kind, size, is_heavy, workspace, is_aligned = self.step.traits_of(node)
        is_returned = not is_repeat and node in self.step.returned
        item = Item(kind, size, reads, is_stored, is_returned, is_heavy, workspace, is_aligned=is_aligned)
        return self._append(item, anchor, node)

    def _append(self, item: Item, anchor: Node, made: Node) -> int:
        """Append an item for ``made`` or a copy of it; return the item's position."""
        self.items.append(item)
        self.anchors.append(anchor)
        self.made.append(made)
        return len(self.items) - 1

    def _find(self, wanted: Node, reader: Node) -> int:
        """Return the item from which backward reads a value; append the nodes that must run again for that."""
        stack, found = [wanted], self.read_from
        while stack:
            node = stack[-1]
            if node in found:
                stack.pop()
            elif missing := [n for n in self._sources(node) if n not in found]:
                stack += missing
            else:
                found[stack.pop()] = self._supply(node, reader)
        return found[wanted]

    def _sources(self, node: Node) -> Iterable[Node]:
        """Return the nodes that backward must have before it can have ``node``."""
        cast = self.step.casts.get(node)
        if cast is not None:
            return () if self._has_copy(cast.x) else (cast.x,)
        if self.step.needs_no_saving(node) or node in self.kept:
            return ()
        return self.step.operands[node]

    def _supply(self, node: Node, reader: Node) -> int:
        source = self.step.undecoded(node)
        if source is not node and source in self.step.copied:
            kind = self._cast_kind(self.step.copied[source], None)
            return self._append(Item(kind, result_bytes(node), [self.copies[source]], is_aligned=True), reader, node)
        if source is not node and not self._has_copy(source):
            is_same = tensor_of(node).dtype == tensor_of(source).dtype
            return self.read_from[source] if is_same else self._converted(node, self.read_from[source], reader)
        if self.step.needs_no_saving(source):
            return self.at[source]
        form = self.kept.get(source)
        if form is not None:
            copy = self._reload(source, reader) if form.is_on_host else self.copies.get(source, self.at[source])
            if form.format is None:
                return copy
            kind = self._cast_kind(form.format, form)
            read = self._append(Item(kind, result_bytes(node), [copy], is_aligned=True), reader, node)
            self.decoded.setdefault(source, []).append(read)
            return read
        self.repeated.append((node, reader))
        reads = [self.read_from[n] for n in self.step.operands[node]]
        if node.target in CASTS:
            return self._converted(node, reads[0], reader)
        return self._add(node, reads, reader, is_repeat=True)

    def _converted(self, node: Node, read: int, reader: Node) -> int:
        """Return the item of a recomputed value in another dtype. Inductor computes equal conversions once."""
        key = read, tensor_of(node).dtype
        if key not in self._conversions:
            converted = Item(Kind.FUSED, result_bytes(node), [read], is_aligned=True)
            self._conversions[key] = self._append(converted, reader, node)
        return self._conversions[key]

    def _let_wait(self, x: Node) -> None:
        """Let an input that a repeated node reads wait in place of its copy; other nodes of backward then read it, too.

        `crossings.rewrite` converts it for them. Inductor computes equal conversions once.
        """
        self.items[self.copies[x]].bytes = 0
        for node, item in self.read_from.items():
            if node is not x and self.step.undecoded(node) is x:
                dtype = tensor_of(node).dtype
                first, again = sorted((item, self._conversions.setdefault((self.at[x], dtype), item)))
                self.items[again] = Item(Kind.VIEW, 0, [first])
                kind = Kind.VIEW if dtype is tensor_of(x).dtype else Kind.FUSED
                self.items[first] = Item(kind, result_bytes(node), [self.at[x]], is_aligned=True)

    def _has_copy(self, node: Node) -> bool:
        return node in self.kept and self.kept[node].format is not None

    def _reload(self, value: Node, reader: Node) -> int:
        if value not in self.reloads:
            self.reloaded.append((value, reader))
            size = self.kept[value].num_bytes(tensor_of(value))
            self.reloads[value] = self._append(Item(Kind.EXTERN, size, [self.offloads[value]]), reader, value)
        return self.reloads[value]

    def lives(self, node: Node, time: int, *, recomputed: bool) -> bool:
        """Return whether a value is in memory at a time: its kept copy, or with ``recomputed`` the recomputed value."""
        return any(self._living(node, time, recomputed=recomputed))

    def live_bytes(self, node: Node, time: int, *, recomputed: bool) -> int:
        """Return the bytes of a value at a time: of its kept copy, and of what is decoded from it; or recomputed."""
        return sum(self.items[item].bytes for item in self._living(node, time, recomputed=recomputed))

    def _living(self, node: Node, time: int, *, recomputed: bool) -> Iterator[int]:
        if recomputed:
            items = {self.read_from.get(node)}
        else:
            copy = self.copies.get(node, self.at[node])
            items = {copy, self.reloads.get(node, copy), *self.decoded.get(node, ())}
        born, dies = self.timeline.born, self.timeline.dies
        return (item for item in items if item in born and born[item] <= time <= dies[item])

    def live_by_kind(self, moments: int = _MOMENTS) -> tuple[tuple[int, ...], ...]:
        """Return the live bytes at up to ``moments`` moments, by kind as in `PeakBytes.live`."""
        timeline = self.timeline
        change = [[0] * len(LIVE) for _ in range(len(timeline.order) + 1)]
        kinds = self._kinds()
        for item, born in timeline.born.items():
            change[born][kinds[item]] += self.items[item].bytes
            change[timeline.dies[item] + 1][kinds[item]] -= self.items[item].bytes
        for time, item in enumerate(timeline.order):
            change[time][-1] += self.items[item].workspace
            change[time + 1][-1] -= self.items[item].workspace
        rows = list(accumulate(change[:-1], lambda row, delta: [a + b for a, b in zip(row, delta, strict=True)]))
        return tuple(map(tuple, drawn(rows, sum, moments)))

    def moments_in_sizes(self) -> list[sympy.Expr]:
        """Return the live bytes at each time as an expression in the dynamic dimensions.

        A kernel's workspace is assumed to grow in proportion to its result.
        """
        timeline, growth = self.timeline, list(map(_growth, self.made))
        change = [sympy.Integer(0)] * (len(timeline.order) + 1)
        for item, born in timeline.born.items():
            size = self.items[item].bytes * growth[item]
            change[born] += size
            change[timeline.dies[item] + 1] -= size
        workspaces = [self.items[item].workspace * growth[item] for item in timeline.order]
        lives = accumulate(change[:-1])
        return [sympy.expand(live + more) for live, more in zip(lives, workspaces, strict=True)]

    def _kinds(self) -> list[int]:
        """Return the kind of each item, an index into `LIVE`."""
        kept, narrow, few, recomputed, returned, others = range(len(LIVE))
        found = [others] * len(self.items)
        for item in range(self.border, len(self.items)):
            found[item] = returned if self.timeline.is_returned(item) else others
        for item in self.read_from.values():
            if item >= self.border:
                found[item] = recomputed
        for node, form in self.kept.items():
            fmt = form.format
            is_few = isinstance(fmt, BlockFormat | Bit) and fmt.bits < WHOLE_BITS
            for item in {self.copies.get(node, self.at[node]), self.reloads.get(node, self.at[node])}:
                found[item] = few if is_few else kept if fmt is None or fmt.bits > WHOLE_BITS else narrow
        return found

    @property
    def peak(self) -> int:
        """Return the live bytes at the step's peak."""
        return self.timeline.peak
