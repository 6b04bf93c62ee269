"""Edit the joint graph as the chooser decided: keep each value in its form, or recompute it in backward.

A copy's format changes, a new copy is inserted, or new backward nodes recompute a value from kept values. The partition
follows these nodes (`analysis.saved_values`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.calls import Call
from fxprec.ir.symbolic import Dequantize
from fxprec.kernels.host import Offload, Reload, WaitOffload, WaitReload
from fxprec.passes.analysis.joint import operator_of, tensor_of
from fxprec.passes.analysis.saved_values import is_repeated
from fxprec.passes.analysis.ways import row_of
from fxprec.passes.base import Work
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.forms.stage import Stage
from fxprec.passes.sites import emit, emit_call, insertion_point_after


@dataclass
class Rewrite:
    """Edits the joint graph as the chooser decided, and records each value's way in its site."""

    work: Work
    needs: Needs
    fit: Fit
    replacements: dict[Node, Node] = field(default_factory=dict)  # node -> the node that backward reads instead
    repeated_by_partition: set[Node] = field(default_factory=set)
    """Values that the partition repeats. Readers of their copies read them instead."""

    def __post_init__(self) -> None:
        self.graph: Graph = self.work.joint.graph
        self.kept = self.fit.replay.kept
        self.stage = Stage(self.work, self.needs, self.kept)

    def run(self) -> None:
        """Edit the graph, and record each value's way in its site."""
        self.rewrite()
        self._record_ways()

    def rewrite(self) -> None:
        """Edit the graph."""
        for node, form in sorted(self.kept.items(), key=lambda item: not item[1].is_random):  # random ones draw a seed
            form.store(node, self.stage)
        for node, reader in self.fit.replay.reloaded:
            self._move(node, reader)
        for node, reader in self.fit.replay.repeated:
            self._repeat(node, reader)
        for reader in self.needs.step.backward:
            self._read_replacements(reader)
        for value, casts in self.stage.casts.items():
            if value not in self.kept or self._is_moved_itself(value):
                self._erase(casts)

    def _move(self, node: Node, reader: Node) -> None:
        """Move a value, or its copy, to host memory, and back to the device before ``reader``."""
        decoded = self.stage.decoded.get(node)
        copy = node if decoded is None else decoded.all_input_nodes[0]
        with self.graph.inserting_before(insertion_point_after(copy).next):
            begun = emit_call(self.graph, Offload(copy), node)
        sent = max(begun, insertion_point_after(self.fit.replay.sent[node]))
        with self.graph.inserting_before(sent.next):
            host = emit_call(self.graph, WaitOffload(begun, copy), node)
        with self.graph.inserting_before(max(host.next, min(self.fit.replay.fetched[node], reader))):
            coming = self._in_backward(Reload(host, self.work.book.table), node, copy)
        with self.graph.inserting_before(reader):
            back = self._in_backward(WaitReload(coming), node, copy)
            for x, read in Dequantize.among(list(copy.users)) if decoded is not None else ():
                self.replacements[x] = self.stage.decoded[node] = self._in_backward(replace(read, q=back), node, x)
        if decoded is None:
            self.replacements[node] = back

    def _in_backward(self, call: Call, like: Node, shown: Node) -> Node:
        return emit_call(self.graph, call, like, backward=True, val=tensor_of(shown))

    def _is_moved_itself(self, value: Node) -> bool:
        return value in self.kept and self.kept[value].is_on_host and self.kept[value].format is None

    def _repeat(self, node: Node, reader: Node) -> None:
        """Recompute a value before ``reader`` from values that backward has. Checkpoints are left to the partition."""
        if (
            node in self.needs.step.checkpointed
            or node in self.needs.step.casts
            or (node in self.needs.step.decoded and not any(self._changed(n) for n in node.all_input_nodes))
        ):
            return
        sources = {n: self._replacement(n, reader) for n in node.all_input_nodes}
        if is_repeated(node, self.work.joint) and all(new is n for n, new in sources.items()):
            self.repeated_by_partition.add(node)
            return
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), sources.__getitem__)
        target, val = operator_of(node), node.meta["val"]
        with self.graph.inserting_before(reader):
            self.replacements[node] = emit(self.graph, target, args, node, kwargs=kwargs, backward=True, val=val)

    def _changed(self, node: Node) -> bool:
        value = self.needs.step.casts.get(node)
        return node in self.replacements or (
            value is not None and (value.x in self.replacements or value.x in self.repeated_by_partition)
        )

    def _replacement(self, node: Node, reader: Node) -> Node:
        """Return the node that a recomputed node reads instead of ``node``."""
        if node in self.replacements:
            return self.replacements[node]
        cast = self.needs.step.casts.get(node)
        if cast is not None and (cast.x in self.replacements or cast.x in self.repeated_by_partition):
            return self.stage.as_dtype(self.replacements.get(cast.x, cast.x), tensor_of(node).dtype, reader)
        if node in self.stage.decoded:  # a decode for a GEMM may have 16 bits
            if reader < self.stage.decoded[node]:
                reader.prepend(self.stage.decoded[node])
            return self.stage.as_dtype(self.stage.decoded[node], tensor_of(node).dtype, reader)
        if node.op == "placeholder" and self.needs.step.may_wait_itself(node):
            self.replacements[node] = node  # backward's other nodes then read the input, too, instead of its low copy
        return node

    def _read_replacements(self, reader: Node) -> None:
        for source in reader.all_input_nodes:
            is_kept = source.op == "placeholder" or (source in self.kept and not self.kept[source].is_on_host)
            if source not in self.needs.step.backward_set and not is_kept and self._changed(source):
                reader.replace_input_with(source, self._replacement(source, reader))

    def _erase(self, casts: Iterable[Node]) -> None:
        for q in casts:
            for x in list(q.users):
                if not x.users:
                    self.graph.erase_node(x)
            if not q.users:
                self.graph.erase_node(q)

    def _record_ways(self) -> None:
        """Record in each site the way of its value."""
        sites, repeated = self.work.book.sites, {node for node, _ in self.fit.replay.repeated}
        for node, row in self.needs.rows.items():
            if node in self.kept:
                sites[row] = self.kept[node].plan_row(sites[row], node, self.stage)
            elif node in repeated:
                sites[row] = row_of(sites[row], "recompute", self.stage.hi.name, _WHY_RECOMPUTED)


_WHY_RECOMPUTED = "it is recomputed in backward to meet the peak budget"
