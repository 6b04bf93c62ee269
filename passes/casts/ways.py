"""Make real which way each value goes: in what format it is kept, or that it is computed again in backward.

A copy's format is changed, a copy is made that was not, or what backward reads is computed again there, by nodes of its
own that read what is kept: the partition follows them (`analysis.crossings`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.calls import Call
from fxprec.ir.symbolic import AS_STORED, Dequantize, Quantize, stored_dtype
from fxprec.kernels.host import Offload, Reload, WaitOffload, WaitReload
from fxprec.numerics.blocks import BlockFormat
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis.crossings import is_repeated
from fxprec.passes.analysis.joint import operator_of, tensor_of
from fxprec.passes.analysis.peak.choice import Fit
from fxprec.passes.analysis.peak.needs import Needs
from fxprec.passes.base import Work
from fxprec.passes.casts.blocks import SIGNS, WHOLE_BITS, draw_seed, store_in_blocks
from fxprec.passes.casts.sites import emit, emit_call, insertion_point_after, store_as
from fxprec.plan.rows import Site, Way

_CONVERT = torch.ops.prims.convert_element_type.default


@dataclass
class Rewrite:
    """Makes a choice of ways real in the joint graph, and says it in the sites."""

    work: Work
    needs: Needs
    fit: Fit
    new: dict[Node, Node] = field(default_factory=dict)  # what backward reads instead
    decoded: dict[Node, Node] = field(default_factory=dict)  # value -> its copy, read back
    masks: set[Node] = field(default_factory=set)  # of which nothing but whether it is above 0 is kept

    def __post_init__(self) -> None:
        self.graph: Graph = self.work.joint.graph
        self.casts: dict[Node, list[tuple[Node, Quantize]]] = {}
        for q, cast in Quantize.among(Quantize.nodes(self.graph)):
            if any(x in self.needs.step.casts for x in q.users):
                self.casts.setdefault(cast.x, []).append((q, cast))

    def run(self) -> None:
        """Make the choice real, and say in each site which way its value goes."""
        self.rewrite()
        self._tell_sites()

    def rewrite(self) -> None:
        self._keep_in_blocks()
        for node, fmt in self.fit.held.saved.items():
            if not isinstance(fmt, BlockFormat):
                self._keep(node, fmt)
        for node, reader in self.fit.held.reloaded:
            self._move(node, reader)
        for node, reader in self.fit.held.repeated:
            self._repeat(node, reader)
        for reader in self.needs.step.backward:
            self._read_new(reader)
        for value, casts in self.casts.items():
            if value not in self.fit.held.saved or self._is_moved_itself(value):
                self._erase(q for q, _ in casts)

    def _keep(self, node: Node, fmt: Format | None) -> None:
        """Save a value as it is, or in a format."""
        if self._is_moved_itself(node):
            return
        if fmt is None:
            for q, _ in self.casts.get(node, ()):
                for x, read in Dequantize.among(list(q.users)):
                    x.replace_all_uses_with(self._as(node, read.dtype, x))
            return
        for q, _ in self.casts.get(node, ()):
            store_as(fmt, q)
            self.decoded[node] = next(iter(q.users))
        if node not in self.casts:
            self.decoded[node] = self._store(node, fmt)

    def _keep_in_blocks(self) -> None:
        """Save values in block formats; those of fewer than 8 bits are rounded at random, by one seed."""
        formats = {n: fmt for n, fmt in self.fit.held.saved.items() if isinstance(fmt, BlockFormat)}
        casts = {node: self.casts.pop(node)[0][0] for node in formats}
        coarse = [casts[node] for node, fmt in formats.items() if fmt.bits < WHOLE_BITS]
        seed = draw_seed(self.graph, min(coarse)) if coarse else None
        for node, fmt in formats.items():
            if not store_in_blocks(self.graph, casts[node], fmt, seed if fmt.bits < WHOLE_BITS else None):
                self.masks.add(node)

    def _store(self, node: Node, fmt: Format) -> Node:
        """Make a copy that was not; return it read back."""
        book, val = self.work.book, tensor_of(node)
        row = self.needs.rows[node]
        with self.graph.inserting_before(insertion_point_after(node).next):
            narrow = torch.empty_like(val, dtype=stored_dtype(fmt, book.storage))
            q = emit_call(self.graph, Quantize(node, book.table, row, fmt.name, book.storage), node, val=narrow)
            read = Dequantize(q, book.table, AS_STORED, fmt.name, book.storage, val.dtype)
            return emit_call(self.graph, read, node, val=val)

    def _move(self, node: Node, reader: Node) -> None:
        """Have a value, or its copy, wait in host memory, and come back before ``reader``."""
        decoded = self.decoded.get(node)
        copy = node if decoded is None else decoded.all_input_nodes[0]
        with self.graph.inserting_before(insertion_point_after(copy).next):
            begun = emit_call(self.graph, Offload(copy), node)
        sent = max(begun, insertion_point_after(self.fit.held.sent[node]))
        with self.graph.inserting_before(sent.next):
            host = emit_call(self.graph, WaitOffload(begun, copy), node)
        with self.graph.inserting_before(max(host.next, min(self.fit.held.fetched[node], reader))):
            coming = self._in_backward(Reload(host, self.work.book.table), node, copy)
        with self.graph.inserting_before(reader):
            back = self._in_backward(WaitReload(coming), node, copy)
            for x, read in Dequantize.among(list(copy.users)) if decoded is not None else ():
                self.new[x] = self.decoded[node] = self._in_backward(replace(read, q=back), node, x)
        if decoded is None:
            self.new[node] = back

    def _in_backward(self, call: Call, like: Node, shown: Node) -> Node:
        return emit_call(self.graph, call, like, backward=True, val=tensor_of(shown))

    def _is_moved_itself(self, value: Node) -> bool:
        held = self.fit.held
        return value in held.moved and held.saved[value] is None

    def _as(self, node: Node, dtype: torch.dtype, before: Node) -> Node:
        if tensor_of(node).dtype == dtype:
            return node
        with self.graph.inserting_before(before):
            return emit(self.graph, _CONVERT, (node, dtype), node, backward=True, val=tensor_of(node).to(dtype))

    def _repeat(self, node: Node, reader: Node) -> None:
        """Compute a value again before ``reader``, from what backward has; the partition repeats checkpoints."""
        if (
            node in self.needs.step.again
            or node in self.needs.step.casts
            or (node in self.needs.step.decoded and not any(self._changed(n) for n in node.all_input_nodes))
        ):
            return
        sources = {n: self._there(n, reader) for n in node.all_input_nodes}
        if is_repeated(node, self.work.joint) and all(there is n for n, there in sources.items()):
            return  # the partition repeats it
        with self.graph.inserting_before(reader):
            again = emit(self.graph, operator_of(node), (), node, backward=True, val=node.meta.get("val"))
        again.args, again.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: sources[n])
        self.new[node] = again

    def _changed(self, node: Node) -> bool:
        value = self.needs.step.casts.get(node)
        return node in self.new or (value is not None and value.x in self.new)

    def _there(self, node: Node, reader: Node) -> Node:
        """Return what a node that runs again reads in the place of ``node``."""
        if node in self.new:
            return self.new[node]
        cast = self.needs.step.casts.get(node)
        if cast is not None and cast.x in self.new:
            return self._as(self.new[cast.x], tensor_of(node).dtype, reader)
        if node in self.decoded:  # perhaps for a GEMM, in 16 bits
            return self._as(self.decoded[node], tensor_of(node).dtype, reader)
        if node.op == "placeholder" and not self._is_parameter(node):
            self.new[node] = node  # others of backward read it too, in the place of its low copy
        return node

    def _is_parameter(self, node: Node) -> bool:
        return self.work.joint.describe(node).kind in ("param", "table")

    def _read_new(self, reader: Node) -> None:
        held = self.fit.held
        for source in reader.all_input_nodes:
            is_kept = source.op == "placeholder" or (source in held.saved and source not in held.moved)
            if source not in self.needs.step.behind and not is_kept and self._changed(source):
                reader.replace_input_with(source, self._there(source, reader))

    def _erase(self, casts: Iterable[Node]) -> None:
        for q in casts:
            for x in list(q.users):
                if not x.users:
                    self.graph.erase_node(x)
            if not q.users:
                self.graph.erase_node(q)

    def _tell_sites(self) -> None:
        """Say in each site which way its value goes."""
        hi, repeated = self.work.settings.recipe.hi, {node for node, _ in self.fit.held.repeated}
        for node, row in self.needs.rows.items():
            site = self.work.book.sites[row]
            if node in self.fit.held.saved:
                fmt = self.fit.held.saved[node] or _own(node, hi)
                if isinstance(fmt, BlockFormat):
                    low, saved_as = self.needs.low.get(node, hi), SIGNS if node in self.masks else fmt
                    self.work.book.sites[row] = replace(_on(site, "narrow", low.name), saved_as=saved_as.name)
                    continue
                is_low = fmt.bits < hi.bits
                way: Way = "offload" if node in self.fit.held.moved else "narrow" if is_low else "keep"
                said = _on(site, way, fmt.name, self.needs.refused.get(node, ""))
                self.work.book.sites[row] = replace(said, reads="backward") if is_low else said
            elif node in repeated:
                self.work.book.sites[row] = _on(site, "recompute", hi.name)


def _on(site: Site, way: Way, fmt: str, narrow_why: str = "") -> Site:
    why = narrow_why if way == "narrow" else _WHY[way]
    reads = "backward" if way == "narrow" else site.reads
    return replace(site, way=way, format=fmt, reads=reads, why=why, unread=False, saved_as="")


_WHY = {
    "keep": "the peak budget leaves room to keep it",
    "recompute": "the peak budget has it computed again in backward",
    "offload": "the peak budget has it wait in host memory",
}


def _own(node: Node, hi: Format) -> Format:
    return parse("fp32") if tensor_of(node).dtype == torch.float32 else hi
