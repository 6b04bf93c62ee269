"""Find nodes that become one kernel: maximal connected regions that are computed element by element or row by row.

A region is *flat* (every value has the same number of elements) or *by rows* (some value is a reduction over the last
dimension; the values of a row stay in one program). Two regions are joined only if no path leads from one to the other
through a node outside: that node would have to run in the middle of the kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import DEQUANTIZE, KEEP_NONFINITE, QUANTIZE, RESCALE, Dequantize, KeepCodes, Quantize
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import argument, input_at, tensor_of
from fxprec.passes.analysis.marks import mark, marks
from fxprec.passes.lowering.triton.sizes import Size, numel_of, product, shape_of
from fxprec.passes.lowering.triton.table import (
    BYTES,
    CODES,
    EXPRESSIONS,
    FLAT_VIEWS,
    FLOATS,
    POWERS,
    REDUCTIONS,
    VALUES,
)

aten = torch.ops.aten
MAX_NODES = 160
"""Most nodes of a region. The values of more nodes do not fit into registers."""
MAX_COLUMNS = 8192
"""Most elements of a row: one program keeps 16 per thread at 16 warps. Inductor keeps longer rows."""

"""Key of ``meta``: the name, before lowering, of the node that a node copies."""
VAR_MEAN = aten.var_mean.correction
_SHOWING = ops.ALIASES | {aten.view.dtype}
_CODECS = (QUANTIZE, DEQUANTIZE)
_SYMBOLIC = (*_CODECS, KEEP_NONFINITE, RESCALE)


@dataclass(eq=False)
class Region:
    """Nodes that become one kernel. ``columns`` is the length of a row, None if the region is flat."""

    numel: Size
    columns: int | None = None
    full: set[Node] = field(default_factory=set)
    rows: set[Node] = field(default_factory=set)
    """Nodes with one element per row."""
    nodes: list[Node] = field(default_factory=list)
    """All nodes, in the graph's order; set at the end."""

    @property
    def members(self) -> set[Node]:
        """Return all nodes of the region, including those with one value per row."""
        return self.full | self.rows

    @property
    def has_codec(self) -> bool:
        """Return whether the region encodes or decodes."""
        return any(n.target in _CODECS for n in self.members)


def find_regions(graph: Graph) -> list[Region]:
    """Return the regions that encode or decode, in an order in which they can run.

    Inductor computes other regions equally well. Decodes are first copied for each reader (`_decode_per_reader`).
    """
    _decode_per_reader(graph)
    finder = _Finder({n: i for i, n in enumerate(graph.nodes)})
    for node in graph.nodes:
        finder.visit(node)
    for node in graph.nodes:
        finder.join_readers(node)
    _decode_where_read(graph, finder.region_of)
    found = [r for r in dict.fromkeys(finder.region_of.values()) if r.has_codec]
    for region in found:
        region.nodes = sorted(region.members, key=finder.index.__getitem__)
    return found


def is_supported(node: Node) -> bool:
    """Return whether the generator can print ``node``."""
    if node.op != "call_function":
        return False
    val = node.meta.get("val")
    if node.target is VAR_MEAN:
        return _reduces_last(node) and tensor_of(input_at(node, 0)).dtype == torch.float32
    if node.target is operator.getitem:
        return input_at(node, 0).target is VAR_MEAN and is_supported(input_at(node, 0))
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return False
    if node.target is QUANTIZE:
        return val.dtype in CODES or Quantize.of(node).is_simulated
    if node.target is KeepCodes.target or (node.target is KEEP_NONFINITE and val.dtype in BYTES):
        return val.dtype in CODES
    if node.target in _SYMBOLIC:
        return val.dtype in FLOATS
    if shows_codes(node):
        return True
    if val.dtype not in VALUES or not all(_is_value(n) for n in node.all_input_nodes):
        return False
    if node.target in REDUCTIONS:
        return _reduces_last(node)
    if node.target in FLAT_VIEWS or node.target is aten.expand.default:
        return True
    if node.target is aten.pow.Tensor_Scalar:
        return argument(node, 1) in POWERS
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return False
    return str(node.target) in EXPRESSIONS and not any(isinstance(a, list | tuple) for a in node.args)


def is_view(node: Node) -> bool:
    """Return whether ``node`` computes nothing."""
    return node.target in FLAT_VIEWS or node.target is aten.expand.default or shows_codes(node)


def shows_codes(node: Node) -> bool:
    """Return whether ``node`` views one-byte codes unchanged, perhaps in another dtype."""
    if node.target not in _SHOWING:
        return False
    return tensor_of(node).dtype in BYTES and tensor_of(input_at(node, 0)).dtype in BYTES


def constant(node: Node) -> int | float | None:
    """Return the number that fills a tensor by construction, which a kernel writes as a literal; otherwise None."""
    number = argument(node, 1) if node.target is aten.full.default else None
    return number if isinstance(number, int | float) else None


def is_constant(node: Node) -> bool:
    """Return whether ``node`` is a tensor filled with one number."""
    return constant(node) is not None


def _is_value(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype in VALUES


def _reduces_last(node: Node) -> bool:
    val = tensor_of(input_at(node, 0))
    dims, keeps = argument(node, 1), argument(node, 2, node.kwargs.get("keepdim", False)) is True
    if not isinstance(dims, list | tuple) or len(dims) != 1 or not keeps or val.ndim == 0:
        return False
    last = shape_of(val)[-1]
    return dims[0] in (-1, val.ndim - 1) and isinstance(last, int) and 1 < last <= MAX_COLUMNS


def _decode_per_reader(graph: Graph) -> None:
    """Give every reader that computes with a decoded tensor its own decode: codes are cheaper to read than values."""
    for x in Dequantize.nodes(graph):
        readers = [u for u in x.users if is_supported(u) and not is_view(u)]
        if not marks(x).origin:
            mark(x, origin=x.name)
        for reader in readers if len(readers) < len(x.users) else readers[1:]:
            with graph.inserting_before(reader):
                own = graph.node_copy(x)
            reader.replace_input_with(x, own)


def _decode_where_read(graph: Graph, region_of: dict[Node, Region]) -> None:
    """Move a decode that only one other region reads into that region: it reads the codes, which are smaller."""
    for x in Dequantize.nodes(graph):
        readers = {region_of.get(u) for u in x.users}
        if len(readers) != 1 or x not in region_of:
            continue
        (reader,) = readers
        here = region_of[x]
        # The reader already ran after this region, so it still can.
        if reader is None or reader is here or reader.numel != here.numel or not _fits(x, reader):
            continue
        here.full.discard(x)
        reader.full.add(x)
        region_of[x] = reader


def _fits(x: Node, region: Region) -> bool:
    return x not in region.rows and region.columns in (None, _row_length(x)) and all(u in region.full for u in x.users)


@dataclass
class _Finder:
    index: dict[Node, int]
    region_of: dict[Node, Region] = field(default_factory=dict)

    def visit(self, node: Node) -> None:
        if not is_supported(node):
            return
        self.region_of[node] = _alone(node)
        for source in node.all_input_nodes:
            if source in self.region_of:
                self._join(node, source)
        if node.target is operator.getitem and self.region_of[node] is not self.region_of[input_at(node, 0)]:
            del self.region_of[node]  # a kernel has no name for one result of another kernel's reduction

    def join_readers(self, node: Node) -> None:
        """Join the regions that round and read a whole tensor in memory, so that it is read once."""
        if node in self.region_of or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        readers = dict.fromkeys(self.region_of[user] for user in node.users if user in self.region_of)
        size = numel_of(node.meta["val"])
        alike = [r for r in readers if r.has_codec and r.numel == size]
        for i, other in enumerate(alike[1:], 1):
            alike[i] = self._together(alike[i - 1], other) or other

    def _join(self, node: Node, source: Node) -> None:
        mine, theirs = self.region_of[node], self.region_of[source]
        if mine is not theirs:
            self._together(theirs, mine, node)

    def _together(self, one: Region, other: Region, reader: Node | None = None) -> Region | None:
        """Join two regions into one; None if they cannot be. ``reader`` is a node of the second region."""
        joined = _joined(one, other)
        if joined is None or len(joined.members) > MAX_NODES:
            return None
        if (reader is not None and not _reads_well(joined, reader)) or self._has_cycle(joined.members):
            return None
        for member in joined.members:
            self.region_of[member] = joined
        return joined

    def _has_cycle(self, members: set[Node]) -> bool:
        """Return whether a node outside reads ``members`` and is read by them; a region counts as one node."""
        # A node that ends before the members begin cannot lie between them, so the search stays short: 0.024 s for
        # ResNet-50's forward half (2292 nodes). Ancestors in a networkx graph contracted at each join took 0.32 s.
        first = min(self.index[n] for n in members)
        todo = [s for n in members for s in n.all_input_nodes if s not in members]
        seen: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            region = self.region_of.get(node)
            whole = {node} if region is None else region.members
            if max(self.index[n] for n in whole) < first:
                continue
            seen |= whole
            for source in (s for n in whole for s in n.all_input_nodes):
                if source in members:
                    return True
                if source not in seen:
                    todo.append(source)
        return False


def _alone(node: Node) -> Region:
    """Return the region of a single node."""
    if node.target is operator.getitem:
        return Region(numel_of(node.meta["val"]), None, {node})
    if node.target in REDUCTIONS or node.target is VAR_MEAN:
        x = tensor_of(input_at(node, 0))
        return Region(numel_of(x), shape_of(x)[-1], set(), {node})
    return Region(numel_of(node.meta["val"]), None, {node})


def _joined(a: Region, b: Region) -> Region | None:
    """Join two regions if their elements correspond, else return None. Nodes are not checked against their inputs."""
    if a.numel == b.numel:
        columns = b.columns if a.columns is None else a.columns
        if columns is not None and (b.columns or columns) != columns:
            return None
        joined = Region(a.numel, columns, a.full | b.full, a.rows | b.rows)
        return joined if columns is None or all(_row_length(n) == columns for n in joined.full) else None
    for wide, narrow in ((a, b), (b, a)):
        if wide.columns is None or narrow.columns is not None or _rounds(narrow):
            continue
        if wide.numel == narrow.numel * wide.columns:
            return Region(wide.numel, wide.columns, set(wide.full), wide.rows | narrow.full)
    return None


def _rounds(region: Region) -> bool:
    """Return whether a region rounds: a kernel of rows would round, and count, a row's one value in every column."""
    return any(node.target in (QUANTIZE, KeepCodes.target, KEEP_NONFINITE) for node in region.full)


def _row_length(node: Node) -> Size:
    shape = shape_of(node.meta["val"])
    return shape[-1] if shape else 1


def _reads_well(region: Region, node: Node) -> bool:
    """Return whether ``node`` reads each input of the region at its own element or row."""
    for source in node.all_input_nodes:
        if source in region.rows and node in region.full:
            wide, narrow = shape_of(node.meta["val"]), shape_of(source.meta["val"])
            if narrow[-1:] != (1,) or product(narrow[:-1]) != product(wide[:-1]) or len(narrow) > len(wide):
                return False
            if tuple(s for s in narrow[:-1] if s != 1) != tuple(s for s in wide[:-1] if s != 1):
                return False
        if source in region.full and node in region.rows and not is_reduction(node):
            return False
    return True


def is_reduction(node: Node) -> bool:
    """Return whether ``node`` reduces rows."""
    return node.target in REDUCTIONS or node.target is VAR_MEAN


def outputs(region: Region) -> list[Node]:
    """Return the nodes to write: those read outside, returned from the graph, or read outside through a view."""
    members = region.members
    return [n for n in region.nodes if not is_view(n) and n.target is not VAR_MEAN and _is_read_outside(n, members)]


def _is_read_outside(node: Node, members: set[Node]) -> bool:
    return any(u not in members or (is_view(u) and _is_read_outside(u, members)) for u in node.users)


def in_order(graph: Graph, regions: Iterable[Region]) -> list[Region]:
    """Move nodes so that the nodes of each region are adjacent, and return the regions in that order."""
    region_of = {n: r for r in regions for n in r.members}
    done: set[Node] = set()
    order: list[Node] = []
    placed: dict[Region, None] = {}

    def ready(node: Node) -> list[Node]:
        whole = region_of[node].nodes if node in region_of else [node]
        return [
            s
            for n in whole
            for s in n.all_input_nodes
            if s not in done and region_of.get(s) is not region_of.get(node, node)
        ]

    for start in graph.nodes:
        stack = [start]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            waiting = ready(node)
            if waiting:
                stack += reversed(waiting)
                continue
            stack.pop()
            whole = region_of[node].nodes if node in region_of else [node]
            if node in region_of:
                placed[region_of[node]] = None
            done.update(whole)
            order += whole
    cursor = graph._root
    for node in order:
        cursor.append(node)
        cursor = node
    return list(placed)
