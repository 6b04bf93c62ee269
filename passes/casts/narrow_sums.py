"""Store sums of 16-bit gradients that wait for a later kernel in 16 bits, not in float32 or as their addends.

If a tensor is read twice, its gradient is the sum of two gradients that convolutions or GEMMs computed in 16 bits. The
float32 sum waits in four bytes an element, or Inductor recomputes the sum in each reader. In that case all addends
wait, together with the copy that has the ReLU's mask. Under autocast, autograd's own sum has 16 bits.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.ir.symbolic import InMemory
from fxprec.passes.analysis.joint import numel_hint, tensor_of, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.base import Work
from fxprec.passes.casts.own_buffers import ExternKernels
from fxprec.passes.sites import emit, emit_call, replace_node

_ADD, _WHERE = torch.ops.aten.add.Tensor, torch.ops.aten.where.self
_RANGE = torch.finfo(torch.bfloat16).max
"""bfloat16's largest number. A dtype with this range overflows on no sum that float32 represents."""


def narrow_sums(work: Work) -> None:
    """Store waiting sums of the joint graph's backward half in 16 bits."""
    step = Step(work.joint)
    kernels = ExternKernels.of(step.backward)
    for node in step.backward:
        if not any(user in kernels.at and kernels.between(node, user) for user in node.users):
            continue
        dtype = _sum_of(node, step)
        if dtype is not None:
            _store_narrow(node, dtype)


def _sum_of(node: Node, step: Step) -> torch.dtype | None:
    """Return the 16-bit dtype of the addends of a float32 sum, masked or not; None if the node is no such sum."""
    if value(node) is None or tensor_of(node).dtype != torch.float32:
        return None
    addends = _addends(node, step)
    found = {tensor_of(x).dtype for x in addends}
    is_made = len(addends) > 1 or node.target is _WHERE
    if not is_made or len(found) != 1:
        return None
    dtype = found.pop()
    is_narrow = dtype.is_floating_point and dtype.itemsize == 2 and torch.finfo(dtype).max >= _RANGE
    is_whole = all(numel_hint(tensor_of(x)) == numel_hint(tensor_of(node)) for x in addends)
    return dtype if is_narrow and is_whole else None


def _addends(node: Node, step: Step) -> list[Node]:
    """Return the gradients that a sum adds, before they were widened and masked."""
    found, sums, stack = list[Node](), set[Node](), [node]
    while stack:
        node = stack.pop()
        if node in sums:
            continue
        if node.target is _ADD and not node.kwargs:
            sums.add(node)
            stack += node.all_input_nodes
        elif node.target is _WHERE:
            sums.add(node)
            stack += (x for x in node.all_input_nodes[1:] if x in step.backward_set)
        else:
            found.append(node.all_input_nodes[0] if node.target is CONVERT else node)
    return found


def _store_narrow(node: Node, dtype: torch.dtype) -> None:
    graph, readers, val = node.graph, list(node.users), tensor_of(node)
    with graph.inserting_before(node.next):
        narrow = emit(graph, CONVERT, (node, dtype), node, val=val.to(dtype))
        buffer = emit_call(graph, InMemory(narrow), node, val=torch.empty_like(tensor_of(narrow)))
        wide = emit(graph, CONVERT, (buffer, val.dtype), node, val=val)
    for reader in readers:
        if reader.target is CONVERT and tensor_of(reader).dtype == dtype:
            replace_node(reader, buffer)
        else:
            reader.replace_input_with(node, wide)
