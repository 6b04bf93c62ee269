"""Store tensors beside convolutions channels-last, the layout that Inductor's CPU convolutions require.

A kernel call fixes the layout of its result before the convolution that reads it has required one. Without this module
ResNet-18 (batch 32) copied every activation and gradient once more, and compiled 12 kernels for these copies.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fxprec import compat
from fxprec.ir.symbolic import Dequantize, KeepNonfinite, Quantize
from fxprec.passes.analysis.joint import input_at, made_by, tensor_of, value

aten = torch.ops.aten
_BACKWARD = aten.convolution_backward.default
_AS_STRIDED = aten.as_strided.default
_WEIGHT = 2  # its position among the arguments
_CONVOLUTIONS = frozenset({aten.convolution.default, _BACKWARD})


def prefer_channels_last(graph: Graph, inlined: Collection[Node] = ()) -> None:
    """Make the input of every ``quantize`` beside a 2-D convolution channels-last; nothing happens if it already is.

    Casts in ``inlined`` take the layout of the loop that they become part of.
    """
    forced: dict[Node, Node] = {}
    for q, cast in Quantize.among(n for n in Quantize.nodes(graph) if n not in inlined):
        x = cast.x
        strides = _channels_last(x.meta["val"]) if _is_convolved(x, q) else None
        if strides is None:
            continue
        if x not in forced:
            with graph.inserting_before(q):
                forced[x] = graph.call_function(compat.FORCE_STRIDES, (x, strides))
            forced[x].meta["val"] = x.meta["val"]
        for guard, kept in _guards(q):
            if kept.x is x:
                guard.args = replace(kept, x=forced[x]).args
        q.args = replace(cast, x=forced[x]).args


def share_channels_last(graph: Graph) -> None:
    """Let convolutions read a value channels-last from one buffer, if a ``convolution_backward`` reads the value too.

    Otherwise Inductor writes such a value with the strides in the graph (contiguous), for instance when backward
    recomputes it, and copies it once more for each convolution.
    """
    for node in list(graph.nodes):
        readers = [user for user in node.users if user.target in _CONVOLUTIONS]
        is_shared = len(node.users) > 1 and any(user.target is _BACKWARD for user in readers)
        if node.op != "call_function" or not is_shared:
            continue
        val = value(node)
        strides = None if val is None else _channels_last(val)
        if strides is None:
            continue
        with graph.inserting_after(node):
            forced = graph.call_function(compat.FORCE_STRIDES, (node, strides))
        forced.meta["val"] = val
        for reader in readers:
            reader.replace_input_with(node, forced)


def show_shapes_alike(graph: Graph) -> None:
    """View a parameter that only gives a ``convolution_backward`` its shape in the dtype of the other arguments.

    Inductor converts all inputs of a kernel to the widest dtype among them.
    """
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        shown, dtype = input_at(node, _WEIGHT), tensor_of(input_at(node, 0)).dtype
        if shown.target is not _AS_STRIDED or tensor_of(shown).dtype == dtype:
            continue
        with graph.inserting_before(node):
            bits = graph.call_function(aten.view.dtype, (input_at(shown, 0), dtype))
            alike = graph.call_function(_AS_STRIDED, (bits, *shown.args[1:]))
            bits.meta["val"] = tensor_of(input_at(shown, 0)).view(dtype)
            alike.meta["val"] = tensor_of(shown).to(dtype)
        node.replace_input_with(shown, alike)


def _is_convolved(x: Node, q: Node) -> bool:
    if made_by(x).target in _CONVOLUTIONS:
        return True
    readers = [node for node, _ in (*Dequantize.among(q.users), *_guards(q))]
    return any(user.target in _CONVOLUTIONS for reader in readers for user in reader.users)


def _guards(q: Node) -> list[tuple[Node, KeepNonfinite]]:
    """Return the ``keep_nonfinite`` nodes of the tensors that are decoded from ``q``."""
    return [guard for x, _ in Dequantize.among(q.users) for guard in KeepNonfinite.among(x.users)]


def _channels_last(val: torch.Tensor) -> list[int] | None:
    """Return the channels-last strides; None if the tensor is not 4-D, or has unknown sizes."""
    if val.ndim != 4 or not all(isinstance(size, int) for size in val.shape[1:]):
        return None
    return compat.channels_last_strides(val.shape)
