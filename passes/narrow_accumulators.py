"""Simulate accumulators: round every GEMM's products and partial sums (Han et al. 2020, section 5)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.config.accumulator import Accumulator
from fxprec.kernels import accumulators
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import factors_of, input_at, item_of, value
from fxprec.passes.analysis.operators import module_of, source_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.values import is_float_tensor
from fxprec.passes.base import Pass, Work
from fxprec.passes.notice import Notice
from fxprec.passes.sites import emit
from fxprec.plan.lines import place


@dataclass(frozen=True)
class NarrowAccumulators(Pass):
    """Replace GEMMs, forward and backward, by ``fxprec::matmul`` and ``fxprec::convolution``."""

    name: str = "narrow-accumulators"

    def apply(self, work: Work) -> None:
        accumulator = work.settings.accumulator
        if accumulator is None:
            return
        work.remarks.append(f"GEMMs add up in {accumulator.describe()}")
        graph = work.joint.graph
        for node in list(graph.nodes):
            if node.target not in ops.GEMMS | ops.GEMMS_BACKWARD:
                continue
            rewrite = _REWRITES.get(node.target)
            if rewrite is None or not all(is_float_tensor(n) for n in node.all_input_nodes):
                work.notices.append(_notice(node, accumulator))
                continue
            with graph.inserting_before(node):
                rewrite(_Emitter(graph, node, _arguments(accumulator)))


def _arguments(accumulator: Accumulator) -> tuple[object, ...]:
    return accumulator.products.name, accumulator.format.name, accumulator.kahan, accumulator.chunk or 0


def _notice(node: Node, accumulator: Accumulator) -> Notice:
    site = place(node.name, module_of(node), source_of(node))
    fused = node.target in ops.ATTENTION | ops.ATTENTION_BACKWARD
    way_out = "; torch.nn.attention.sdpa_kernel(SDPBackend.MATH) replaces it by GEMMs" if fused else ""
    return Notice(site, f"{node.target} keeps its own accumulator, not {accumulator.format.name}{way_out}")


@dataclass(frozen=True)
class _Emitter:
    """Inserts nodes in front of one GEMM and replaces it."""

    graph: Graph
    gemm: Node
    sums: tuple[object, ...]

    def op(self, target: Callable[..., Any], *args: object) -> Node:
        return emit(self.graph, target, args, self.gemm)

    def matmul(self, a: object, b: object) -> Node:
        return self.op(accumulators.MATMUL, a, b, *self.sums)

    def replace(self, old: Node, new: Node) -> None:
        val = value(old)
        if val is not None and val.dtype != torch.float32:
            new = self.op(CONVERT, new, val.dtype)
        old.replace_all_uses_with(new)

    def scaled(self, x: Node, factor: object) -> Node:
        return x if factor == 1 else self.op(ops.aten.mul.Tensor, x, factor)


def _product(out: _Emitter) -> None:
    out.replace(out.gemm, out.matmul(*factors_of(out.gemm)))


def _product_and_sum(out: _Emitter) -> None:
    """Compute ``beta * input + alpha * (a @ b)``; the outer addition is in float32."""
    added = input_at(out.gemm, 0)
    alpha, beta = (out.gemm.kwargs.get(name, 1) for name in ("alpha", "beta"))
    product = out.scaled(out.matmul(*factors_of(out.gemm)), alpha)
    if beta != 0:
        product = out.op(ops.aten.add.Tensor, product, out.scaled(added, beta))
    out.replace(out.gemm, product)


def _vector_product(out: _Emitter) -> None:
    """Multiply an (m, k) by a (k,) operand, or two (k,) operands."""
    a, b = input_at(out.gemm, 0), input_at(out.gemm, 1)
    dot = a.meta["val"].dim() == 1
    rows = out.op(ops.aten.unsqueeze.default, a, 0) if dot else a
    product = out.op(ops.aten.squeeze.dim, out.matmul(rows, out.op(ops.aten.unsqueeze.default, b, 1)), 1)
    out.replace(out.gemm, out.op(ops.aten.squeeze.dim, product, 0) if dot else product)


def _convolution(out: _Emitter) -> None:
    x, weight, bias, *window = out.gemm.args
    sums = out.op(accumulators.CONVOLUTION, x, weight, *window, _is_channels_last(out.gemm), *out.sums)
    if isinstance(bias, Node):
        ones = [1] * (out.gemm.meta["val"].dim() - 2)
        sums = out.op(ops.aten.add.Tensor, sums, out.op(ops.aten.view.default, bias, [-1, *ones]))
    out.replace(out.gemm, sums)


def _convolution_backward(out: _Emitter) -> None:
    grad, x, weight, _, *window, mask = out.gemm.args
    assert isinstance(mask, list | tuple)
    assert isinstance(grad, Node)
    parts = {user: item[1] for user in out.gemm.users if (item := item_of(user)) is not None}
    layout = any(_is_channels_last(part) for part, index in parts.items() if index != 2)
    both = out.op(accumulators.CONVOLUTION_BACKWARD, x, weight, *window, layout, *out.sums, grad, list(mask[:2]))
    for part, index in parts.items():
        if index == 2:
            dims = [d for d in range(grad.meta["val"].dim()) if d != 1]
            out.replace(part, out.op(ops.aten.sum.dim_IntList, grad, dims))
        else:
            out.replace(part, out.op(operator.getitem, both, index))


def _is_channels_last(node: Node) -> bool:
    val = node.meta["val"]
    return val.dim() == 4 and val.is_contiguous(memory_format=torch.channels_last) and not val.is_contiguous()


_REWRITES: dict[object, Callable[[_Emitter], None]] = {
    ops.aten.mm.default: _product,
    ops.aten.bmm.default: _product,
    ops.aten.addmm.default: _product_and_sum,
    ops.aten.baddbmm.default: _product_and_sum,
    ops.aten.mv.default: _vector_product,
    ops.aten.dot.default: _vector_product,
    ops.aten.convolution.default: _convolution,
    ops.aten.convolution_backward.default: _convolution_backward,
}
