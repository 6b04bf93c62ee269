"""Compute a convolution's two gradients in two calls, so that its input is freed before the input's gradient is made.

One call computes both, so the input, its gradient and the output's gradient live at once. The gradient of the input is
a transposed convolution of the output's gradient, by the same kernel of oneDNN or cuDNN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec import compat
from fxprec.passes.analysis.joint import item_of, tensor_of, unconverted, value
from fxprec.passes.sites import emit, replace_node

_BACKWARD, _CONVOLUTION = torch.ops.aten.convolution_backward.default, torch.ops.aten.convolution.default

_SHOWN = torch.ops.aten.as_strided.default


def split_gradients(graph: Graph) -> None:
    """Split each backward call of a joint graph that computes both gradients."""
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        args: Any = node.args
        gradient, x, weight, _, stride, padding, dilation, is_transposed, _, groups, mask = args
        items = {item[1]: user for user in node.users if (item := item_of(user)) is not None}
        if is_transposed or not mask[1] or 0 not in items or _is_empty(gradient) or _is_empty(weight):
            continue
        beyond = _output_padding(tensor_of(x), tensor_of(gradient), tensor_of(weight), stride, padding, dilation)
        if beyond is None:
            continue
        node.args = (gradient, x, _shape_of(weight, gradient), *args[3:-1], [False, *mask[1:]])
        node.meta["val"] = (None, *node.meta["val"][1:])
        with graph.inserting_before(items[0]):
            transposed = (gradient, weight, None, stride, padding, dilation, True, beyond, groups)
            new = emit(graph, _CONVOLUTION, transposed, items[0], val=tensor_of(items[0]))
        replace_node(items[0], new)


def _is_empty(node: Node) -> bool:
    """Return whether a tensor has no elements. ATen's convolution takes such weights, transposed it refuses them."""
    return any(isinstance(size, int) and size == 0 for size in tensor_of(node).shape)


def _shape_of(weight: Node, gradient: Node) -> Node:
    """Return the weight operand for the call that computes the weight's gradient, which reads only the weight's shape.

    On a CPU the operand is the parameter, viewed with channels-last strides, because oneDNN would copy a contiguous
    weight. So the weight's 16-bit copy can be made after its gradient, not before. Elsewhere the operand is the weight
    itself.
    """
    given = unconverted(weight)
    val, shown = tensor_of(weight), value(given)
    if given.op != "placeholder" or shown is None or val.ndim != 4 or val.device.type != "cpu":
        return weight
    is_static = all(isinstance(size, int) for size in val.shape)
    if not is_static or not shown.is_contiguous() or shown.stride(-1) != 1:  # a 1 x 1 weight may be channels-last, too
        return weight
    strides = compat.channels_last_strides(val.shape)
    with gradient.graph.inserting_before(gradient.next):
        return emit(gradient.graph, _SHOWN, (given, list(val.shape), strides), gradient)


def _output_padding(
    x: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int] | None:
    """Return by how much an input exceeds the smallest input with this output size; None if a size is dynamic."""
    found = []
    for i, step in enumerate(stride):
        wide, made, kernel = x.shape[2 + i], gradient.shape[2 + i], weight.shape[2 + i]
        if step == 1:
            found.append(0)
        elif all(isinstance(size, int) for size in (wide, made, kernel)):
            found.append(wide - (made - 1) * step + 2 * padding[i] - dilation[i] * (kernel - 1) - 1)
        else:
            return None
    return found
