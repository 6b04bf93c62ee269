"""Insert calls of kernels into the graph, in the form of a user's Triton kernel that Inductor knows.

A launch allocates nothing and waits for nothing. The outputs are ``empty_strided`` nodes that Inductor plans like its
own buffers, and all counters of a graph are one zeroed tensor. So CUDA graphs can record the launch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from fxprec.numerics.stats import SITE_COUNTERS
from fxprec.passes.analysis.joint import input_at, tensor_of, value
from fxprec.passes.analysis.marks import mark
from fxprec.passes.lowering.triton.kernel import Argument, Kernel
from fxprec.passes.lowering.triton.shapes_in_graph import SizeNodes
from fxprec.passes.lowering.triton.sizes import shape_of, strides_of

aten = torch.ops.aten


class KernelCalls(Protocol):
    """The node by which the installed torch calls a user's Triton kernel from a graph."""

    @property
    def target(self) -> Any:
        """Return the functional higher-order operator."""

    def keywords(
        self, source: str, name: str, programs: object, arguments: dict[str, object], written: list[str]
    ) -> dict[str, Any]:
        """Load the kernel; return the operator's keyword arguments."""


def insert_launch(
    graph: Graph,
    calls: KernelCalls,
    source: str,
    name: str,
    programs: object,
    arguments: dict[str, object],
    written: list[str],
) -> Node:
    """Insert the launch of a kernel, whose value has the arguments in ``written``."""
    keywords = calls.keywords(source, name, programs, arguments, written)
    call = graph.call_function(calls.target, (), keywords)
    vals = _distinct_values(keywords)
    call.meta["val"] = {name: vals["kwargs"][name] for name in written}
    call.meta["eager_input_vals"] = ((), vals)  # Inductor then gives the kernel exactly these strides
    return call


def _distinct_values(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return ``keywords`` with the value of each node, an object of its own.

    Inductor traces the launch with these values. Two nodes with one value would become one argument, so a kernel would
    read its empty output instead of its input.
    """
    vals: dict[Node, Any] = {}

    def val(node: Node) -> Any:
        if node not in vals:
            found = node.meta["val"]
            vals[node] = found.detach() if isinstance(found, torch.Tensor) else found
        return vals[node]

    return torch.fx.map_arg(keywords, val)


@dataclass
class Launches:
    """The calls of one graph, in order; ``watched`` are the rows whose counters they write."""

    graph: Graph
    table: Node | None
    calls: KernelCalls
    sizes: SizeNodes
    made: list[tuple[Kernel, Node]] = field(default_factory=list)
    watched: list[int] = field(default_factory=list)
    counters: Node | None = None
    _zeros: Node | None = None

    def add(self, kernel: Kernel) -> None:
        """Call ``kernel`` at the position of its region. Raises `Unprintable` if a size has no node."""
        first = kernel.region.nodes[0]
        with self.graph.inserting_before(first):
            near = [n for n in (*(a.node for a in kernel.inputs), *kernel.region.nodes) if value(n) is not None]
            near = [n for n in near if n not in kernel.region.members]
            arguments: dict[str, object] = {a.name: self._memory(a) for a in kernel.inputs}
            if kernel.rows:
                arguments["table"] = self.table
            if kernel.watched:
                arguments["counters"] = self._counters(tensor_of(kernel.outputs[0].node))
            outputs = {a.name: self._empty(a, near) for a in kernel.outputs}
            arguments |= outputs
            arguments |= {name: self.sizes.of(size, near) for name, size in kernel.sizes}
            arguments |= {f"row{i}": _plain(row) for i, row in enumerate(kernel.rows)}
            if kernel.watched:
                arguments["slot"] = _plain(len(self.watched))
            programs = self.sizes.programs(kernel.sizes[0][1], kernel.per_program, near)
            written = [*outputs, *(["counters"] if kernel.watched else [])]
            call = insert_launch(self.graph, self.calls, kernel.source, kernel.name, programs, arguments, written)
            for a in kernel.outputs:
                a.node.replace_all_uses_with(self._result(call, a, outputs[a.name]))
            if kernel.watched:
                self.watched += kernel.watched
                self.counters = self._item(call, "counters", arguments["counters"])
        self.made.append((kernel, call))

    def finish(self) -> Node | None:
        """Set the size of the counters; return them, if there are any."""
        if self._zeros is None or self.counters is None:
            return None
        size = len(self.watched) * SITE_COUNTERS
        self._zeros.args = ([size], 0)
        self.counters.meta["val"] = self._zeros.meta["val"].new_empty(size)
        return self.counters

    def _memory(self, argument: Argument) -> Node:
        node = argument.node
        val = node.meta["val"]
        if val.dtype == argument.dtype:
            return node
        if node.target is aten.view.dtype and tensor_of(viewed := input_at(node, 0)).dtype == argument.dtype:
            return viewed
        return self._view(node, argument.dtype)

    def _view(self, node: Node, dtype: torch.dtype) -> Node:
        new = self.graph.call_function(aten.view.dtype, (node, dtype))
        new.meta["val"] = node.meta["val"].view(dtype)
        return new

    def _empty(self, argument: Argument, near: list[Node]) -> Node:
        val = argument.node.meta["val"]
        shape = [self.sizes.of(s, near) for s in shape_of(val)]
        strides = [self.sizes.of(s, near) for s in strides_of(val)]
        options = {"dtype": argument.dtype, "device": val.device}
        node = self.graph.call_function(aten.empty_strided.default, (shape, strides), options)
        node.meta["val"] = val if val.dtype == argument.dtype else val.view(argument.dtype)
        return node

    def _counters(self, val: torch.Tensor) -> Node:
        """Return the counters, on the device of ``val``."""
        if self.counters is None:
            options: dict[str, Any] = {"dtype": torch.int32, "device": val.device}
            self._zeros = self.graph.call_function(aten.full.default, ([SITE_COUNTERS], 0), options)
            self._zeros.meta["val"] = val.new_empty(SITE_COUNTERS, dtype=torch.int32)
            self.counters = self._zeros
        return self.counters

    def _result(self, call: Node, argument: Argument, empty: Node) -> Node:
        new = self._item(call, argument.name, empty)
        if argument.node.meta["val"].dtype != argument.dtype:
            new = self._view(new, argument.node.meta["val"].dtype)
        new.meta = {**argument.node.meta, "val": new.meta["val"]}
        mark(new, origin=argument.origin)
        return new

    def _item(self, call: Node, name: str, like: object) -> Node:
        new = self.graph.call_function(operator.getitem, (call, name))
        assert isinstance(like, Node)
        new.meta["val"] = like.meta["val"]
        return new


def _plain(number: int) -> int:
    """Encode a number as an odd number from 3 on: compilers specialise code for 1 and for multiples of 16."""
    return 2 * number + 3
