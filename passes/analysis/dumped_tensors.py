"""Mark the tensors that ``dump_tensors`` names, before passes insert casts between a value and its readers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.config.tensor_patterns import KINDS, TensorPattern
from fxprec.errors import did_you_mean
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.gradients import GradientWalk
from fxprec.passes.analysis.groups import Grouped
from fxprec.passes.analysis.marks import mark, marks
from fxprec.passes.analysis.tensors import CountedTensor

aten = torch.ops.aten
_COPIES = ops.ALIASES | {aten.clone.default}
_SHOWN = 8


def mark_dumped(grouped: Grouped, patterns: Sequence[str]) -> list[str]:
    """Mark the nodes of the tensors that match a pattern; return a message for each pattern that matches none."""
    found: dict[Node, list[CountedTensor]] = defaultdict(list)
    parsed = {text: TensorPattern.of(text) for text in patterns}
    missed = set(patterns)
    for node, tensor in _tensors(grouped):
        taking = {text for text, p in parsed.items() if p.takes(tensor.name, tensor.kind, tensor.module)}
        missed -= taking
        if taking:
            found[node].append(tensor)
    for node, tensors in found.items():
        mark(node, dumped=tuple(tensors))
    return [_no_match(text, grouped.tensors) for text in patterns if text in missed]


def dumped_in(graph: Graph) -> Iterator[tuple[Node, CountedTensor]]:
    """Yield each marked node of a graph with each tensor that is its value."""
    for node in graph.nodes:
        for tensor in marks(node).dumped:
            yield node, tensor


def _tensors(grouped: Grouped) -> Iterator[tuple[Node, CountedTensor]]:
    """Yield every counted tensor that is one node's value; a gradient's node sums its contributions."""
    yield from grouped.values.items()
    walk = GradientWalk(grouped, lambda node, target, users: node)
    walk.run()
    for value, tensor in grouped.grads.items():
        if (node := walk.gradient_of(value)) is not None:
            yield _maker(node), tensor


def _maker(node: Node) -> Node:
    """Return the node that computed a value, below copies and pairs of transpositions, which Inductor removes."""
    while node.op == "call_function":
        above = node.all_input_nodes[0] if node.all_input_nodes else node
        if node.target in _COPIES:
            node = above
        elif node.target is above.target is aten.permute.default and _undoes(node.args[1], above.args[1]):
            node = above.all_input_nodes[0]
        else:
            break
    return node


def _undoes(later: Any, earlier: Any) -> bool:
    return all(earlier[d] == i for i, d in enumerate(later))


def _no_match(text: str, tensors: Sequence[CountedTensor]) -> str:
    pattern = TensorPattern.of(text)
    modules = sorted({t.module for t in tensors if t.module})
    kinds = [
        k for k in KINDS if any(t.kind == k and pattern.takes(t.name, pattern.kind or k, t.module) for t in tensors)
    ]
    if kinds:  # the module is there
        return f"pattern {text!r} matches nothing: of these tensors there is {', '.join(kinds)}, no {pattern.kind}"
    names = modules or sorted({t.name for t in tensors})
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    what = "modules" if modules else "tensors"
    return f"pattern {text!r} matches nothing{did_you_mean(pattern.where, names)}; {what} are {shown}"
