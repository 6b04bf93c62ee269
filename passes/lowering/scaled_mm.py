"""Multiply operands in blocks on tensor cores that scale (sm_100): codes and swizzled scales replace numbers.

``mm(view(dequantize(a)), permute(view(dequantize(b))))`` becomes ``fxprec::scaled_mm`` of the codes. A grouped product
becomes ``fxprec::scaled_grouped_mm``, and so does a batch of products, as groups of equal size. An operand is encoded
in the layout that the product reads, without records of scale and codes in between. Records that MS-EDEN corrected are
split into scales and codes. Other products stay decoded, and are returned with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from fxprec.ir.grouped import GroupedMm
from fxprec.kernels.scaled_mm import ScaledGroupedMm, ScaledMm, scaling_of
from fxprec.numerics.swizzle import ROWS
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.coded_gemms import MATMULS
from fxprec.passes.analysis.joint import factors_of, input_at, numel_hint, tensor_of
from fxprec.passes.analysis.operators import module_of, source_of
from fxprec.passes.lowering.block_operands import BlockOperand, Encoder, Groups, is_from_blocks
from fxprec.passes.lowering.gemm_casts import call, substitute
from fxprec.plan.lines import named

aten = torch.ops.aten
UNIT = 16
"""Divides the columns of the result and the bytes of a row of codes: tensor cores read so many bytes at once."""


class Product(Protocol):
    """A product that tensor cores can compute from the codes."""

    def lower(self, made: Encoder) -> None:
        """Replace the GEMM by the product of codes."""


def multiply_blocks(graph: Graph) -> tuple[tuple[str, str], ...]:
    """Replace products of operands in blocks; return those that stay decoded: node, module and line, and the reason."""
    made = Encoder(graph)
    left = []
    for node in list(graph.nodes):
        if node.target not in ops.GEMM_OPERANDS or not any(map(is_from_blocks, factors_of(node))):
            continue
        product = _product_of(node)
        if isinstance(product, str):
            left.append((_place(node), product))
        else:
            product.lower(made)
    graph.eliminate_dead_code()
    return tuple(left)


def _place(node: Node) -> str:
    return named(node.name, module_of(node), source_of(node))


def _product_of(node: Node) -> Product | str:
    """Return the product for a GEMM, or the reason why there is none."""
    in_groups = _IN_GROUPS.get(node.target)
    if in_groups is None and (node.target not in MATMULS or set(node.kwargs) & {"alpha", "beta"}):
        return f"{node.target} is not a plain product of two matrices"
    found = [BlockOperand.of(factor) for factor in factors_of(node)]
    operands = [operand for operand in found if operand is not None]
    if len(operands) < 2:
        return "one of its operands is not in blocks, or is rearranged before it is multiplied"
    first, second = operands
    refused = _refusal(first, second, node)
    if refused is not None:
        return refused
    if in_groups is not None:
        return _not_grouped(first, node) or in_groups(node, first, second)
    return _unaddable(node) or _Matrices(node, first, second)


def _refusal(first: BlockOperand, second: BlockOperand, node: Node) -> str | None:
    if first.format != second.format:
        return f"its operands are in {first.format.name} and {second.format.name}, and torch needs one format for both"
    if scaling_of(first.format) is None:
        return f"torch multiplies mxfp8_e4m3 and nvfp4 in blocks, and not {first.format.name}"
    wrong = [
        operand
        for operand, is_first in ((first, True), (second, False))
        if not operand.side and not operand.sums_columns(is_first)
    ]
    if wrong:
        return "the blocks of an operand do not lie along the summed dimension"
    summed, columns = tensor_of(factors_of(node)[0]).shape[-1], tensor_of(node).shape[-1]
    if columns % UNIT or summed * first.format.bits // 8 % UNIT:
        return f"tensor cores read {UNIT} bytes at once: {summed} summed elements and {columns} columns do not fit"
    return None


@dataclass(frozen=True)
class _Matrices:
    """A product of two matrices."""

    node: Node
    first: BlockOperand
    second: BlockOperand

    def lower(self, made: Encoder) -> None:
        node, first, second, bias = self.node, self.first, self.second, _bias(self.node)
        dtype = tensor_of(node).dtype
        fused = bias if dtype != torch.float32 else None  # cuBLASLt adds no float32 bias
        (a, scale_a), (b, scale_b) = made.of(first, True, node), made.of(second, False, node)
        wholes = first.read.whole, second.read.whole
        with made.graph.inserting_before(node):
            new = ScaledMm(a, b, scale_a, scale_b, *wholes, fused, first.format.name, dtype).insert(made.graph)
            new.meta = dict(node.meta)
            if bias is not None and fused is None:
                new = call(made.graph, aten.add.Tensor, new, bias)
        substitute(made.graph, node, new)


def _bias(node: Node) -> Node | None:
    return input_at(node, 0) if node.target is aten.addmm.default else None


def _unaddable(node: Node) -> str | None:
    bias = _bias(node)
    return "the added tensor is not a vector" if bias is not None and tensor_of(bias).ndim != 1 else None


@dataclass(frozen=True)
class _Grouped:
    """A grouped product: of tokens and each expert's matrix, or of two operands of tokens, over which it sums."""

    node: Node
    first: BlockOperand
    second: BlockOperand

    def lower(self, made: Encoder) -> None:
        node, first, second = self.node, self.first, self.second
        ends = GroupedMm.of(node).offs
        tokens = Groups(ends, are_summed=len(second.shape) == 2)
        a, scale_a = made.of(first, True, node, tokens)
        b, scale_b = made.of(second, False, node, tokens if tokens.are_summed else None)
        wholes = first.read.whole, second.read.whole
        with made.graph.inserting_before(node):
            new = ScaledGroupedMm(a, b, scale_a, scale_b, *wholes, ends, first.format.name).insert(made.graph)
            new.meta = _metadata(node)
        substitute(made.graph, node, new)


@dataclass(frozen=True)
class _Batched:
    """A batch of products: rows of the first operand are the tokens of groups of equal size."""

    node: Node
    first: BlockOperand
    second: BlockOperand

    def lower(self, made: Encoder) -> None:
        node, first, second, graph = self.node, self.first, self.second, made.graph
        batch, rows, columns = tensor_of(node).shape
        (a, scale_a), (b, scale_b) = made.of(first, True, node), made.of(second, False, node)
        wholes = first.read.whole, second.read.whole
        like: dict[str, Any] = {"dtype": torch.int32, "device": tensor_of(node).device}
        with graph.inserting_before(node):
            a = call(graph, aten.view.default, a, [batch * rows, -1])
            scale_a = call(graph, aten.view.default, scale_a, [batch * (-(-rows // ROWS) * ROWS), -1])
            ends = graph.call_function(aten.arange.start_step, (rows, batch * rows + 1, rows), like)
            new = ScaledGroupedMm(a, b, scale_a, scale_b, *wholes, ends, first.format.name).insert(graph)
            new.meta = {**_metadata(node), "val": tensor_of(node).new_empty(batch * rows, columns)}
            new = call(graph, aten.view.default, new, [batch, rows, columns])
        substitute(graph, node, new)


def _metadata(node: Node) -> dict[str, object]:
    """Return a product's metadata without the arguments that it was traced with; Inductor would expect them."""
    return {key: value for key, value in node.meta.items() if key != "eager_input_vals"}


_IN_GROUPS: dict[object, type[_Grouped | _Batched]] = {GroupedMm.target: _Grouped, aten.bmm.default: _Batched}


def _not_grouped(first: BlockOperand, node: Node) -> str | None:
    """Return why torch's grouped product does not take the operands that `_refusal` does, or None."""
    if len(first.shape) == 3 and node.target is GroupedMm.target:
        return "torch multiplies tokens in blocks by each expert's matrix, and not each expert's matrix by tokens"
    if not numel_hint(tensor_of(node)):
        return "it has no rows"
    if (dtype := tensor_of(node).dtype) != torch.bfloat16:
        return f"torch's grouped products of codes are bfloat16, and this one is {dtype}"
    scaling = scaling_of(first.format)
    if scaling is not None and scaling.block == 16 and not scaling.has_whole:
        return f"torch multiplies mxfp8_e4m3 and nvfp4 in groups, and not {first.format.name}"
    return None
