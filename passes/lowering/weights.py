"""Convert weights of convolutions to the layout that oneDNN reads, and their gradients to the parameters' layout.

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
"""Number of elements from which on a kernel call is worth its cost."""


def lay_out_weights(graph: Graph, gradients: Collection[int]) -> None:
    """Edit a lowered graph of one half; small tensors stay in Inductor's loops.

    ``gradients`` are the positions, among the results, of gradients whose parameters are contiguous.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    results = results_of(graph)
    # Inserted last: until then the gradients stay in the 16 bits in which they are computed.
    for node in (results[at] for at in gradients):
        if isinstance(node, Node) and _is_weight_gradient(node) and _changes_layout(node):
            _replace(graph, node, list(node.users), channels_last=False, at=graph.output_node())
    for weight, readers in _weights(graph).items():
        _replace(graph, weight, readers, channels_last=True, at=min(readers, key=order.__getitem__))


def _is_weight_gradient(node: Node) -> bool:
    """Return whether a node is a convolution's weight gradient, perhaps converted, that backward only returns."""
    item = item_of(unconverted(node))
    return item is not None and item[0].target is _BACKWARD and item[1] == _WEIGHT_GRADIENT and len(node.users) == 1


def _weights(graph: Graph) -> dict[Node, list[Node]]:
    """Map contiguous parameters, and conversions of them, to the convolutions that read them."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        weight = input_at(node, _WEIGHT[node.target]) if node.target in _WEIGHT else None
        if weight is None or weight in found:
            continue
        given = unconverted(weight)
        if given.op == "placeholder" and tensor_of(given).is_contiguous() and _changes_layout(weight):
            # A parameter's other readers read it as it is. A conversion is made for convolutions only, backward's
            # included.
            found[weight] = [user for user in weight.users if user.target in _WEIGHT or weight is not given]
    return found


def _changes_layout(node: Node) -> bool:
    """Return whether a tensor is large, and its contiguous and channels-last layouts differ."""
    x, val = tensor_of(unconverted(node)), tensor_of(node)
    if val.ndim != 4 or not all(isinstance(size, int) for size in val.shape):
        return False
    if not {x.dtype, val.dtype} <= LAID_OUT_DTYPES:
        return False
    return val.numel() >= FROM and val.shape[1] > 1 and val.shape[2] * val.shape[3] > 1


def _replace(graph: Graph, node: Node, readers: list[Node], *, channels_last: bool, at: Node) -> None:
    """Let ``readers`` read, instead of ``node``, a kernel's result that is computed before ``at``."""
    val = tensor_of(node)
    with graph.inserting_before(at):
        laid = LaidOut(unconverted(node), val.dtype, channels_last).insert(graph)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    laid.meta = {**node.meta, "val": torch.empty_like(val, memory_format=layout)}
    for reader in readers:
        reader.replace_input_with(node, laid)
    if node.target is CONVERT and not node.users:
        graph.erase_node(node)
