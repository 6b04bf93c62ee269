"""Store what convolutions read and write channels-last, as Inductor's CPU convolutions want it.

A kernel call fixes the layout of its result before the convolution that reads it has asked for one. Without this,
ResNet-18 (batch 32) copied every activation and gradient once more, and compiled 12 kernels for that alone.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from fxprec import compat
from fxprec.ir import symbolic

aten = torch.ops.aten
_CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})


def prefer_channels_last(graph: Graph) -> None:
    """Make the input of every ``quantize`` beside a 2-D convolution channels-last. A no-op where it is already."""
    forced: dict[Node, Node] = {}
    for q in graph.find_nodes(op="call_function", target=symbolic.QUANTIZE):
        x = q.args[0]
        strides = _channels_last(x.meta["val"]) if _is_convolved(x, q) else None
        if strides is None:
            continue
        if x not in forced:
            with graph.inserting_before(q):
                forced[x] = graph.call_function(compat.FORCE_STRIDES, (x, strides))
            forced[x].meta["val"] = x.meta["val"]
        for guard in [g for g in _guards(q) if g.args[1] is x]:
            guard.args = (guard.args[0], forced[x])
        q.args = (forced[x], *q.args[1:])


def _is_convolved(x: Node, q: Node) -> bool:
    source = x.args[0] if x.target is operator.getitem else x
    if isinstance(source, Node) and source.target in _CONVOLUTIONS:
        return True
    readers = [u for u in q.users if u.target is symbolic.DEQUANTIZE]
    return any(user.target in _CONVOLUTIONS for reader in (*readers, *_guards(q)) for user in reader.users)


def _guards(q: Node) -> list[Node]:
    """Return the ``keep_nonfinite`` nodes of what is read back from ``q``."""
    readers = [u for u in q.users if u.target is symbolic.DEQUANTIZE]
    return [u for reader in readers for u in reader.users if u.target is symbolic.KEEP_NONFINITE]


def _channels_last(val: torch.Tensor) -> list[int] | None:
    """Return the strides, or None where there is nothing to force: not 4-D, or not known before the run."""
    if val.ndim != 4 or not all(isinstance(size, int) for size in val.shape[1:]):
        return None
    return compat.channels_last_strides(val.shape)
