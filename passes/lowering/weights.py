"""Lay out weights of convolutions as oneDNN reads them, and their gradients as the parameters lie.

Convolutions run channels-last on a CPU, and parameters are contiguous. Inductor cannot vectorise the conversion of a
3x3 kernel's nine elements. Autograd (`AccumulateGrad`) copies a gradient whose strides differ from its parameter's.
That copy is a tenth of ResNet-18's step under autocast, batch 16.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from fxprec.kernels.layout import LAID_OUT_DTYPES, LaidOut
from fxprec.passes.analysis.joint import input_at, item_of, results_of, tensor_of, unconverted
from fxprec.passes.analysis.ops import CONVERT

_CONVOLUTION, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_WEIGHT = {_CONVOLUTION: 1, _BACKWARD: 2}  # positions among the arguments
_WEIGHT_GRADIENT = 1  # among the results

FROM = 1 << 15
"""Elements from which on a call of a kernel is worth it."""


def lay_out_weights(graph: Graph, gradients: Collection[int]) -> None:
    """Edit a lowered graph of one half; Inductor's loops keep what is small.

    ``gradients`` are positions among the results: of gradients whose parameters are contiguous.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    results = results_of(graph)
    # Last: until then they are held in the 16 bits in which they are made.
    for node in (results[at] for at in gradients):
        if isinstance(node, Node) and _is_weight_gradient(node) and _is_turned(node):
            _replace(graph, node, list(node.users), channels_last=False, at=graph.output_node())
    for weight, readers in _weights(graph).items():
        _replace(graph, weight, readers, channels_last=True, at=min(readers, key=order.__getitem__))


def _is_weight_gradient(node: Node) -> bool:
    """Say whether backward returns, and nothing else reads, what a convolution makes, converted perhaps."""
    item = item_of(unconverted(node))
    return item is not None and item[0].target is _BACKWARD and item[1] == _WEIGHT_GRADIENT and len(node.users) == 1


def _weights(graph: Graph) -> dict[Node, list[Node]]:
    """Map contiguous parameters, and what is converted from one, to what reads them as convolutions do."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        weight = input_at(node, _WEIGHT[node.target]) if node.target in _WEIGHT else None
        if weight is None or weight in found:
            continue
        given = unconverted(weight)
        if given.op == "placeholder" and tensor_of(given).is_contiguous() and _is_turned(weight):
            # Others read a parameter as it lies; what is converted is made for convolutions, backward's among them.
            found[weight] = [user for user in weight.users if user.target in _WEIGHT or weight is not given]
    return found


def _is_turned(node: Node) -> bool:
    """Say whether a tensor is large, and contiguous and channels-last are two things."""
    x, val = tensor_of(unconverted(node)), tensor_of(node)
    if val.ndim != 4 or not all(isinstance(size, int) for size in val.shape):
        return False
    if not {x.dtype, val.dtype} <= LAID_OUT_DTYPES:
        return False
    return val.numel() >= FROM and val.shape[1] > 1 and val.shape[2] * val.shape[3] > 1


def _replace(graph: Graph, node: Node, readers: list[Node], *, channels_last: bool, at: Node) -> None:
    """Have ``readers`` read a kernel's result, made in front of ``at``, in the place of ``node``."""
    val = tensor_of(node)
    with graph.inserting_before(at):
        laid = LaidOut(unconverted(node), val.dtype, channels_last).insert(graph)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    laid.meta = {**node.meta, "val": torch.empty_like(val, memory_format=layout)}
    for reader in readers:
        reader.replace_input_with(node, laid)
    if node.target is CONVERT and not node.users:
        graph.erase_node(node)
