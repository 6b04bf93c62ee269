"""Compute the gradient of a nearest upsampling as a sum of slices, where autograd scatters.

Autograd adds each pixel's gradient to the pixel that it was read from. In Inductor's CPU loop this takes one atomic
addition an element, a fifth of a U-Net's step. If every pixel was read equally often, in order, the gradient is a sum
of strided slices.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec import compat
from fxprec.ir.symbolic import InMemory
from fxprec.passes.analysis.joint import has_tag, tensor_of
from fxprec.passes.sites import emit, emit_call, replace_node

_aten = torch.ops.aten
_PUTS = (_aten.index_put.default, _aten._unsafe_index_put.default)
_SLICE, _ADD = _aten.slice.Tensor, _aten.add.Tensor
_ZEROS = (_aten.new_zeros.default, _aten.zeros.default)
_MOST = 16
"""The largest number of slices that are added."""


def sum_upsampled(graph: Graph) -> None:
    """Edit a joint graph. Slices are added in the order in which one thread scatters, so the bits are the same."""
    for target in _PUTS:
        for node in graph.find_nodes(op="call_function", target=target):
            factors = _factors(node)
            if factors is not None:
                _sum(graph, node, factors)


def _factors(node: Node) -> list[int] | None:
    """Return the upsampling factor of each of the last dimensions; None if the scatter is no such gradient."""
    args: Any = node.args
    zeros, indices, values, *accumulates = args
    places = [index for index in indices if index is not None]
    if accumulates != [True] or not _is_zero(zeros) or indices[: -len(places)] != [None] * (len(indices) - len(places)):
        return None
    whole, made = tensor_of(zeros).shape[-len(places) :], tensor_of(values).shape[-len(places) :]
    if len(indices) != tensor_of(zeros).ndim or not all(isinstance(n, int) and n for n in (*whole, *made)):
        return None
    if len(made) < len(whole):  # an index is a 0-dim tensor, as in ``x[index]``
        return None
    factors = [wide // narrow for wide, narrow in zip(made, whole, strict=True)]
    for i, place in enumerate(places):
        shape = (made[i], *[1] * (len(places) - 1 - i))
        with compat.real_tensors():
            read = _constant(place)
            if read is None or read.shape != shape or factors[i] * whole[i] != made[i]:
                return None
            if read.flatten().tolist() != [position // factors[i] for position in range(made[i])]:
                return None
    return factors if 1 < torch.Size(factors).numel() <= _MOST else None


def _is_zero(node: Node) -> bool:
    filled: Any = node.args[1] if node.target is _aten.full.default else None
    return node.target in _ZEROS or (filled is not None and float(filled) == 0)


def _constant(node: Node) -> torch.Tensor | None:
    """Compute the value of a node; None if it depends on an input, a random number or an operator of fxprec's."""
    values: dict[Node, torch.Tensor] = {}
    stack = [node]
    while stack:
        made = stack[-1]
        missing = [n for n in made.all_input_nodes if n not in values]
        target: object = made.target
        is_random = has_tag(made, torch.Tag.nondeterministic_seeded)
        if is_random or not isinstance(target, torch._ops.OpOverload) or target.namespace == InMemory.target.namespace:
            return None  # lowering replaces fxprec's own operators: no kernel computes their values
        if missing:
            stack += missing
            continue
        args, kwargs = torch.fx.map_arg((made.args, dict(made.kwargs)), values.__getitem__)
        values[stack.pop()] = target(*args, **kwargs)
    return values[node]


def _sum(graph: Graph, node: Node, factors: Sequence[int]) -> None:
    values: Any = node.args[2]
    first = tensor_of(values).ndim - len(factors)
    total: Node | None = None
    with graph.inserting_before(node):
        for offsets in itertools.product(*map(range, factors)):
            part = values
            for i, (offset, factor) in enumerate(zip(offsets, factors, strict=True)):
                part = emit(graph, _SLICE, (part, first + i, offset, sys.maxsize, factor), node)
            total = part if total is None else emit(graph, _ADD, (total, part), node)
        assert total is not None, "there is a slice"
        buffer = emit_call(graph, InMemory(total), node, val=torch.empty_like(tensor_of(node)))
    replace_node(node, buffer)
