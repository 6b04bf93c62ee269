"""Describe each node of a lowered half: its item, the size of its loop, and the loop's reads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.fx import Graph, Node, map_arg

from fxprec import compat
from fxprec.ir.operators import Moves, moving_as
from fxprec.kernels.coded_gemms import MatmulCodes, MatmulToCodes
from fxprec.kernels.layout import SideBySide
from fxprec.kernels.scaled_mm import ScaledGroupedMm, ScaledMm
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import argument, dim_hint, numel_hint, operator_of, tensor_of, value
from fxprec.passes.analysis.replay.kernels import Kind, kind_of
from fxprec.passes.analysis.replay.loops import Item, Loops

aten = torch.ops.aten
_LAUNCH = compat.TritonCalls.target
_GEMMS = (
    ops.GEMMS
    | ops.GEMMS_BACKWARD
    | {aten.mm.dtype, MatmulCodes.target, MatmulToCodes.target, ScaledMm.target, ScaledGroupedMm.target}
)
_MOST_JOINED = 4
"""Most tensors that Inductor concatenates in one loop; with more, each tensor is written into its place."""
_PERMUTES = moving_as(Moves.ORDER)
_PIECES = moving_as(Moves.PART, Moves.PARTS, Moves.STRIDED)


def set_values(graph: Graph) -> None:
    """Compute each node's fake value: nodes that lowering inserts have none, or a value of another shape."""
    vals = (value(node) for node in graph.find_nodes(op="placeholder"))
    mode = next((val.fake_mode for val in vals if isinstance(val, compat.FakeTensor)), None)
    with mode or contextlib.nullcontext(), torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function" and not _is_launch(node):
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
                node.meta["val"] = operator_of(node)(*args, **kwargs)


def _is_launch(node: Node) -> bool:
    """Return whether a node launches a generated kernel, or is a result of such a launch."""
    return node.target is _LAUNCH or any(n.target is _LAUNCH for n in node.all_input_nodes)


@dataclass(frozen=True)
class Read:
    """A loop's read of one tensor in memory."""

    base: int
    """The item that is read."""
    piece: str = ""
    """The part that is read; empty for the whole tensor."""
    bytes: int = 0
    is_moved: bool = False
    """Whether the tensor is read in another order, or in part, so that its reader and its writer cannot fuse."""


@dataclass
class Memory:
    """The nodes of one lowered half as items, in order, and which items are in memory."""

    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        set_values(self.graph)
        returned = set(self.graph.output_node().all_input_nodes)
        at: dict[Node, int] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            at[node] = len(self.items)
            sources = [at[n] for n in _reads(node)]
            self.nodes.append(node)
            kind = Kind.FUSED if _is_cut_out(node) else _kind(node)
            self.items.append(Item(kind, _bytes(node), sources, is_returned=node in returned))
        for position, node in enumerate(self.nodes):
            if _is_joined_in_place(node):  # each part is written into its place in the result
                for source in self.items[position].reads:
                    self.items[source].is_stored = True

    @cached_property
    def loops(self) -> Loops:
        """Return which items are written to memory, and which of these each item reads."""
        return Loops(self.items)

    def is_in_memory(self, position: int) -> bool:
        """Return whether an item is a tensor in memory of its own: an input, a constant or a kernel's result."""
        item = self.items[position]
        given = item.kind is Kind.FREE and self.nodes[position].op in ("placeholder", "get_attr")
        return given or self.loops.in_memory[position]

    def is_gemm(self, position: int) -> bool:
        """Return whether the node at a position is a GEMM, a convolution or attention."""
        return self.nodes[position].target in _GEMMS

    @cached_property
    def reads(self) -> list[dict[tuple[int, str], Read]]:
        """Return the reads of each item, seen through views and nodes of its own loop."""
        found: list[dict[tuple[int, str], Read]] = []
        for position, item in enumerate(self.items):
            reads: dict[tuple[int, str], Read] = {}
            for source in item.reads:
                whole = {(source, ""): Read(source, "", self.items[source].bytes)}
                own = whole if self.is_in_memory(source) else found[source]
                for read in own.values():
                    shown = self._shown(position, read)
                    reads[shown.base, shown.piece] = shown
            found.append(reads)
        return found

    def _shown(self, position: int, read: Read) -> Read:
        """Return the read of a tensor through the view at ``position``."""
        node = self.nodes[position]
        if _kind(node) is not Kind.VIEW:
            return read
        if node.target in _PERMUTES:
            return Read(read.base, read.piece, read.bytes, is_moved=True)
        val = value(node)
        if val is None or not _is_piece(node):
            return read
        size = min(read.bytes, numel_hint(val) * self._item_bytes(read.base))
        return Read(read.base, f"{read.piece}/{node.target}{_numbers(node)}", size, is_moved=True)

    def _item_bytes(self, position: int) -> int:
        val = value(self.nodes[position])
        return 1 if val is None else val.dtype.itemsize

    def space(self, position: int) -> tuple[int, int]:
        """Return the number of elements that an item's loop iterates over, and the number that it writes."""
        node, made = self.nodes[position], value(self.nodes[position])
        if self.items[position].kind is Kind.REDUCED and node.all_input_nodes:
            source = numel_hint(tensor_of(node.all_input_nodes[0]))
            outs = [made] if made is not None else [v for v in node.meta["val"] if isinstance(v, torch.Tensor)]
            return source, max(numel_hint(out) for out in outs)
        size = 1 if made is None else numel_hint(made)
        return size, size

    def is_split(self, position: int) -> bool:
        """Return whether a reduction is split into two kernels: not innermost, or with few results."""
        if self.items[position].kind is not Kind.REDUCED:
            return False
        over, out = self.space(position)
        source = tensor_of(self.nodes[position].all_input_nodes[0])
        inner = over // max(out, 1)
        return inner > _SHORT and (out < _FEW or not _is_innermost(self.nodes[position], source, inner))


_SHORT, _FEW = 1024, 1024  # elements of a row; number of results


def _is_innermost(node: Node, source: torch.Tensor, count: int) -> bool:
    """Return whether a reduction over ``count`` elements is over a dimension that is innermost in memory."""
    dims = argument(node, 1)
    over = dims if isinstance(dims, list | tuple) else range(source.ndim)
    strides = [dim_hint(source.stride(int(d))) for d in over if isinstance(d, int)]
    return bool(strides) and min(strides) == 1 and count > 0


def _reads(node: Node) -> Iterator[Node]:
    if node.target is _LAUNCH:
        arguments, made = node.kwargs["kwargs"], node.meta["val"]
        assert isinstance(arguments, dict)
        yield from (a for name, a in arguments.items() if isinstance(a, Node) and name not in made)
    elif node.op != "call_function" or node.target in ops.MUTATIONS:
        return
    else:
        yield from node.all_input_nodes


def _kind(node: Node) -> Kind:
    if _is_joined_in_place(node) or node.target is aten.view.dtype:
        return Kind.VIEW
    if node.target is aten.cat.default:
        return Kind.FUSED
    if node.target is aten.empty_strided.default:
        return Kind.FREE
    return kind_of(node)


def _is_piece(node: Node) -> bool:
    return node.target in _PIECES or (bool(node.all_input_nodes) and node.all_input_nodes[0].target in _PIECES)


def _is_cut_out(node: Node) -> bool:
    """Return whether a library's operand is a piece of an unbuffered pointwise result: it is computed by itself."""
    if _kind(node) is not Kind.VIEW or not _is_piece(node) or value(node) is None:
        return False
    base = node
    while _kind(base) is Kind.VIEW and base.all_input_nodes:
        base = base.all_input_nodes[0]
    return _kind(base) is Kind.FUSED and all(_kind(user) is Kind.VIEW for user in base.users)


def _is_joined_in_place(node: Node) -> bool:
    joined = node.target is aten.cat.default and len(node.all_input_nodes) > _MOST_JOINED
    return joined or node.target is SideBySide.target


def _bytes(node: Node) -> int:
    """Return the bytes of a node's result, an expanded dimension once; several results are separate items."""
    val = value(node)
    if val is None or not numel_hint(val):
        return 0
    sizes = [dim_hint(size) for size, stride in zip(val.shape, val.stride(), strict=True) if dim_hint(stride)]
    return math.prod(sizes) * val.dtype.itemsize


def _numbers(node: Node) -> str:
    return str([arg for arg in node.args if not isinstance(arg, Node)])
