"""Give each part of a concatenation its own buffer if it is produced long before the concatenation runs.

A skip connection's tensor is a part of a later block's concatenation. Inductor writes a part into the buffer of the
whole, so the whole buffer is allocated before the other parts are computed. In backward the whole gradient waits for
the reader of the part. With ``in_memory`` only the part waits, at the cost of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.fx import Node

from fxprec.ir.symbolic import InMemory, Quantize
from fxprec.passes.analysis.joint import numel_hint, tensor_of, unconverted, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.replay.kernels import Kind, kind_of
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.base import Work
from fxprec.passes.sites import emit, emit_call, emit_on, insertion_point_after, replace_node

_CAT, _SLICE = torch.ops.aten.cat.default, torch.ops.aten.slice.Tensor


def give_own_buffers(work: Work) -> None:
    """Rewrite concatenations and their gradients; a concatenation may run in the dtype of the GEMM that reads it."""
    step = Step(work.joint)
    concatenations = Concatenations(work, ExternKernels.of(step.forward))
    for node in step.forward:
        if node.target is _CAT:
            concatenations.rewrite(node)
    kernels = ExternKernels.of(step.backward)
    for node in step.backward:
        for part in _read_late(node, kernels):
            _copy_out(part)


@dataclass(frozen=True)
class ExternKernels:
    """Positions of a half's nodes and of its extern kernels: a value that waits for such a kernel is in memory."""

    at: dict[Node, int]
    before: list[int]
    """The number of extern kernels before each position."""

    @classmethod
    def of(cls, half: list[Node]) -> ExternKernels:
        """Number the nodes of one half of a joint graph, given in execution order."""
        kernels = (kind_of(node) is Kind.EXTERN for node in half)
        return cls({node: i for i, node in enumerate(half)}, list(accumulate(kernels, initial=0)))

    def between(self, first: Node, last: Node) -> bool:
        """Return whether an extern kernel runs between ``first`` and ``last``."""
        return self.before[self.at[last]] > self.before[self.at[first] + 1]


@dataclass(frozen=True)
class Concatenations:
    """Rewrites forward's concatenations so that parts have buffers of their own."""

    work: Work
    kernels: ExternKernels
    own_buffers: dict[tuple[Node, torch.dtype], Node] = field(default_factory=dict)

    def rewrite(self, cat: Node) -> None:
        """Concatenate in the dtype that readers read, with early parts in buffers of their own."""
        early = {x for x in cat.all_input_nodes if not _has_own_buffer(x) and self.kernels.between(x, cat)}
        dtype = _read_as(cat)
        if dtype is None or (not early and dtype == tensor_of(cat).dtype):
            return
        graph = self.work.joint.graph
        pieces = {x: self._piece(x, dtype, cat, is_early=x in early) for x in cat.all_input_nodes}
        with graph.inserting_before(cat):
            args = torch.fx.map_arg(cat.args, pieces.__getitem__)
            new = emit(graph, _CAT, args, cat, val=tensor_of(cat).to(dtype))
        for user in list(cat.users):
            if user.target is CONVERT and tensor_of(user).dtype == dtype:
                replace_node(user, new)
        replace_node(cat, new)
        self.kernels.at[new] = self.kernels.at[cat]  # another concatenation may read ``new``
        values = self.work.book.values
        values.update({site: new for site, node in values.items() if node is cat})

    def _piece(self, x: Node, dtype: torch.dtype, cat: Node, *, is_early: bool) -> Node:
        if not is_early:
            return self._converted(x, dtype, cat)
        if (x, dtype) not in self.own_buffers:
            graph, following = self.work.joint.graph, insertion_point_after(x).next
            narrow = self._converted(x, dtype, following)
            with graph.inserting_before(following):
                own = emit_call(graph, InMemory(narrow), x, val=torch.empty_like(tensor_of(narrow)))
                self.own_buffers[x, dtype] = own
        return self.own_buffers[x, dtype]

    def _converted(self, x: Node, dtype: torch.dtype, before: Node) -> Node:
        if tensor_of(x).dtype == dtype:
            return x
        with self.work.joint.graph.inserting_before(before):
            return emit(self.work.joint.graph, CONVERT, (x, dtype), x, val=tensor_of(x).to(dtype))


def _has_own_buffer(x: Node) -> bool:
    """Return whether a value, seen through views and conversions, has its own buffer: an input, an extern result."""
    while x.target is CONVERT or kind_of(x) is Kind.VIEW:
        x = x.all_input_nodes[0]
    return kind_of(x) in (Kind.FREE, Kind.EXTERN, Kind.PIECE)


def _read_as(cat: Node) -> torch.dtype | None:
    """Return the dtype to concatenate in, or None: rounding the parts to it must equal rounding the whole."""
    own, rest = tensor_of(cat).dtype, [user for user in cat.users if Quantize.match(user) is None]
    read = {tensor_of(user).dtype for user in rest if user.target is CONVERT}
    is_rounded = len(read) == 1 and all(user.target is CONVERT for user in rest)
    narrow = next(iter(read)) if is_rounded else own
    is_same = all(tensor_of(x).dtype == own for x in cat.all_input_nodes)
    return narrow if is_same and narrow.is_floating_point and narrow.itemsize <= own.itemsize else None


def _read_late(whole: Node, kernels: ExternKernels) -> Iterator[Node]:
    """Yield the slices of a backward tensor that are read long after the tensor's other readers ran."""
    slices = {s: reads for s in whole.users if s.target is _SLICE and (reads := _reads(s, kernels))}
    others = [read for user in whole.users if user not in slices for read in _reads(user, kernels)]
    ends = {part: max(reads, key=kernels.at.__getitem__) for part, reads in slices.items()}
    for part, reads in slices.items():
        of_others = (end for other, end in ends.items() if other is not part)
        first_of_rest = sorted(of_others, key=kernels.at.__getitem__)[:1]
        rest = max([*others, *first_of_rest], key=kernels.at.__getitem__, default=None)
        first = min(reads, key=kernels.at.__getitem__)
        is_part = numel_hint(tensor_of(part)) < numel_hint(tensor_of(whole))
        if rest is not None and is_part and kernels.at[rest] < kernels.at[first] and kernels.between(rest, first):
            yield part


def _reads(node: Node, kernels: ExternKernels) -> list[Node]:
    """Return the readers of a node, seen through views."""
    if kind_of(node) is not Kind.VIEW:
        return [node] if node in kernels.at else []
    return [read for user in node.users for read in _reads(user, kernels)]


def _copy_out(part: Node) -> None:
    """Copy a slice to a buffer of its own, in the narrower dtype that the whole was widened from."""
    graph, whole = part.graph, part.all_input_nodes[0]
    source = unconverted(whole)
    narrow = value(source)
    if narrow is None or narrow.dtype.itemsize > tensor_of(whole).dtype.itemsize:
        source = whole
    with graph.inserting_before(part):
        shown = emit_on(graph, part, source)
        buffer = emit_call(graph, InMemory(shown), part, val=torch.empty_like(tensor_of(shown)))
        if source is not whole:
            buffer = emit(graph, CONVERT, (buffer, tensor_of(part).dtype), part, val=torch.empty_like(tensor_of(part)))
    replace_node(part, buffer)
