"""Compute GEMMs in the high format's 16-bit dtype.

``gemm(dequantize(a), dequantize(b))`` becomes ``float32(gemm(a16, b16))``. Reading an 8-bit float as bf16 is exact, so
only the GEMM itself is narrower. Sums inside a GEMM stay float32 on every backend that torch has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.config.processor import PORTABLE
from fxprec.ir.symbolic import Dequantize, KeepNonfinite
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.float32_functions import float32_function
from fxprec.passes.analysis.joint import (
    dim_hint,
    factors_of,
    input_at,
    is_backward,
    item_of,
    numel_hint,
    operator_of,
    tensor_of,
    value,
)
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.values import is_mask
from fxprec.passes.analysis.wide_gemms import is_widened
from fxprec.passes.base import Pass, Work
from fxprec.passes.notice import Notice
from fxprec.passes.sites import emit, emit_call, emit_on


@dataclass(frozen=True)
class NarrowGemms(Pass):
    """Make every GEMM, forward and backward, compute in ``recipe.hi``'s dtype."""

    name: str = "narrow-gemms"
    only_attention: bool = False
    """True: convert only a GPU's attention, which `WidenAttention` has turned to float32."""

    def apply(self, work: Work) -> None:
        dtype = work.settings.recipe.hi.torch_dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return
        device_type = work.joint.device.type
        on_cpu, everything = device_type == "cpu", dtype == torch.bfloat16
        if on_cpu and work.settings.processor.vectors == PORTABLE:
            dtype, everything = torch.float32, True  # a 16-bit model's GEMMs are widened, too
        # An unscaled gradient keeps its range in bfloat16, but would underflow in float16.
        targets = ops.GEMMS | ops.GEMMS_BACKWARD if everything else ops.GEMMS
        if self.only_attention:
            targets = ops.ATTENTION_ON_GPU | (ops.ATTENTION_BACKWARD_ON_GPU if everything else frozenset())
        # Under a memory budget the partitioner may save results of GEMMs, so they are narrow.
        leaves_small = on_cpu and dtype == torch.bfloat16 and work.memory_budget == 1
        convert = _Convert(work.joint.graph, dtype)
        for node in list(work.joint.graph.nodes):
            if node.target not in targets or (leaves_small and _is_small(node)):
                continue
            if dtype != torch.float32 and float32_function(node) is not None:
                continue
            if everything or not is_backward(node):
                convert.gemm(node)
        _remark_widened(work)


SMALL = 1 << 20
"""Multiply-adds of a matrix product below which a CPU's bfloat16 GEMM is slower than its float32 GEMM. The call alone
takes 13 us instead of 4 us (one core with AVX512_BF16), and its operands are converted."""


SHORT = 256
"""Tokens below which a CPU's attention is slower in bfloat16, above all its backward: at 64 tokens 12.5 ms, not 2.1."""


def _is_small(node: Node) -> bool:
    """Return whether a CPU multiplies these float32 matrices faster without converting them."""
    if node.target in ops.ATTENTION | ops.ATTENTION_BACKWARD:
        query = tensor_of(factors_of(node)[-3])
        return query.dtype == torch.float32 and dim_hint(query.shape[-2]) < SHORT
    if node.target not in (ops.aten.mm.default, ops.aten.addmm.default):
        return False
    first, val = tensor_of(factors_of(node)[0]), tensor_of(node)
    return val.dtype == torch.float32 and numel_hint(val) * dim_hint(first.shape[1]) < SMALL


def _remark_widened(work: Work) -> None:
    """Add a remark if the CPU lacks 16-bit GEMMs, and a fact for the log unless the user chose the processor."""
    widened = (n for n in work.joint.graph.nodes if is_widened(n, work.settings.processor))
    first = next(widened, None)
    if first is None:
        return
    dtype = tensor_of(factors_of(first)[0]).dtype
    detail = f"the CPU has no {dtype} GEMM: GEMMs read and write {dtype}, and multiply in float32, block by block"
    work.remarks.append(f"narrow-gemms: {detail}")
    if work.settings.asked.cpu is None:
        work.facts.append(Notice("narrow-gemms", detail))


class _Convert:
    """Makes GEMMs compute in ``dtype``. Readers of their results still get the dtype they were traced with."""

    def __init__(self, graph: Graph, dtype: torch.dtype) -> None:
        self.graph, self.dtype = graph, dtype
        self.made: dict[Node, Node] = {}

    def gemm(self, node: Node) -> None:
        floats = [a for a in node.all_input_nodes if _dtype(a) in ops.FLOATS]
        if all(_dtype(a) == self.dtype for a in floats):
            return
        attention = node.target in (ops.ATTENTION | ops.ATTENTION_BACKWARD)
        with self.graph.inserting_before(node):
            factors = [*factors_of(node), *_own_result(node)]
            new = {
                a: self.mask(a) if is_mask(a) or (attention and a not in factors) else self.operand(a, node)
                for a in floats
                if not (attention and (_is_logsumexp(a) or _is_float32_mask(a, node)))
            }
        traced = node.meta["val"]
        node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda a: new.get(a, a))
        fakes, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
        node.meta["val"] = operator_of(node)(*fakes, **kwargs)
        self.restore(node, traced)

    def operand(self, node: Node, gemm: Node) -> Node:
        """Return ``node`` in ``dtype``; a stored copy is decoded to ``dtype`` directly."""
        if _dtype(node) == self.dtype:
            return node  # a conversion would count as a tensor of its own where memory is planned
        converted = self.made.get(node)
        if converted is None or gemm < converted:
            converted = self.made[node] = self._operand(node, gemm)
        return converted

    def mask(self, node: Node) -> Node:
        """Return an attention mask in ``dtype``; float32's least number becomes the dtype's least, not -inf.

        No clamp is needed if ``dtype`` represents all of the mask's numbers. Then the mask's own dtype could not even
        represent the limits.
        """
        limits = torch.finfo(self.dtype)
        if torch.finfo(tensor_of(node).dtype).max <= limits.max:
            return emit(self.graph, CONVERT, (node, self.dtype), node)
        finite = emit(self.graph, ops.aten.clamp_min.default, (node, limits.min), node)
        finite = emit(self.graph, ops.aten.clamp_max.default, (finite, limits.max), node)
        is_inf = emit(self.graph, ops.aten.isinf.default, (node,), node)
        kept = emit(self.graph, ops.aten.where.self, (is_inf, node, finite), node)
        return emit(self.graph, CONVERT, (kept, self.dtype), node)

    def _operand(self, node: Node, gemm: Node) -> Node:
        read, kept = Dequantize.match(node), KeepNonfinite.match(node)
        if read is not None:
            return emit_call(self.graph, replace(read, dtype=self.dtype), node)
        if kept is not None:
            return emit_call(self.graph, replace(kept, rounded=self.operand(kept.rounded, gemm)), node)
        if node.target in ops.VIEWS and len(node.all_input_nodes) == 1 and not node.kwargs:
            return emit_on(self.graph, node, self.operand(node.all_input_nodes[0], gemm))
        return emit(self.graph, CONVERT, (node, self.dtype), node)

    def restore(self, node: Node, traced: object) -> None:
        """Give the users of a converted GEMM the dtype they were traced with."""
        if isinstance(traced, torch.Tensor):
            self._convert_back(node, traced.dtype)
            return
        assert isinstance(traced, tuple | list)
        for user in list(node.users):
            item = item_of(user)
            if item is None:
                continue
            was, user.meta["val"] = traced[item[1]], node.meta["val"][item[1]]
            if isinstance(was, torch.Tensor):
                self._convert_back(user, was.dtype)

    def _convert_back(self, node: Node, dtype: torch.dtype) -> None:
        if _dtype(node) == dtype:
            return
        users = list(node.users)
        with self.graph.inserting_before(node.next):
            back = emit(self.graph, CONVERT, (node, dtype), node)
        for user in users:
            user.replace_input_with(node, back)


def _dtype(node: Node) -> torch.dtype | None:
    val = value(node)
    return None if val is None else val.dtype


def _own_result(node: Node) -> list[Node]:
    """Return the forward result that attention's backward reads: the forward call returned it in ``dtype``."""
    operator: Any = operator_of(node)
    names = [argument.name for argument in operator._schema.arguments]
    return [input_at(node, names.index("out"))] if node.target in ops.ATTENTION_BACKWARD else []


def _is_logsumexp(node: Node) -> bool:
    """Return whether a node is the softmax statistic that attention saves, which stays float32."""
    item = item_of(node)
    return item is not None and item[0].target in ops.ATTENTION and item[1] != 0


def _is_float32_mask(node: Node, attention: Node) -> bool:
    """Return whether ``node`` is the float32 mask of a CPU's attention, which takes it beside operands of any dtype."""
    return node in attention.kwargs.values() and _dtype(node) == torch.float32
