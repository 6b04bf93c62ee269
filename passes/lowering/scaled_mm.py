"""Multiply operands in blocks on tensor cores that scale (sm_100): codes and swizzled scales replace numbers.

``mm(view(dequantize(a)), permute(view(dequantize(b))))`` becomes ``fxprec::scaled_mm`` of the codes. An operand is
encoded in the layout that the product reads, without records of scale and codes in between. Records that MS-EDEN
corrected are split into scales and codes. Other products stay decoded, and are returned with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxprec.ir.grouped import GroupedMm
from fxprec.ir.symbolic import Dequantize, Quantize, is_in_blocks
from fxprec.kernels.scaled_mm import ScaledMm, scaling_of
from fxprec.numerics import block_codec
from fxprec.numerics.block_codec import Encoded
from fxprec.numerics.blocks import BlockFormat, find_blocks
from fxprec.numerics.swizzle import swizzled
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.coded_gemms import BATCHED, MATMULS
from fxprec.passes.analysis.joint import factors_of, input_at, tensor_of
from fxprec.passes.analysis.operators import module_of, source_of
from fxprec.passes.lowering.blocks import traced_in
from fxprec.passes.lowering.gemm_casts import call, substitute
from fxprec.plan.lines import named

aten = torch.ops.aten
UNIT = 16
"""Divides the columns of the result and the bytes of a row of codes: tensor cores read so many bytes at once."""
_COPIES = frozenset({ops.CONVERT, aten.clone.default})


def multiply_blocks(graph: Graph) -> tuple[tuple[str, str], ...]:
    """Replace products of operands in blocks; return those that stay decoded: node, module and line, and the reason."""
    made = _Operands(graph)
    left = []
    for node in list(graph.nodes):
        if node.target not in ops.GEMM_OPERANDS or not any(map(_is_from_blocks, factors_of(node))):
            continue
        product = _Product.of(node)
        if isinstance(product, str):
            left.append((_place(node), product))
        else:
            product.lower(made)
    graph.eliminate_dead_code()
    return tuple(left)


def _place(node: Node) -> str:
    return named(node.name, module_of(node), source_of(node))


def _is_from_blocks(operand: Node) -> bool:
    return any(read.target is Dequantize.target and is_in_blocks(read) for read in _chain(operand))


def _chain(node: Node) -> Iterator[Node]:
    """Yield a node and the nodes that it is a view or a copy of, up to one that reads codes."""
    yield node
    while node.target in ops.VIEWS | _COPIES and node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node


@dataclass(frozen=True)
class _Operand:
    """A matrix that is decoded from blocks: (rows, columns) as it was encoded, in rows or in squares of blocks."""

    read: Dequantize
    rows: int
    columns: int
    side: int
    """Side of a square that shares a scale; 0: blocks lie along the columns."""
    is_transposed: bool
    """Whether the GEMM reads the transposed matrix."""

    @classmethod
    def of(cls, node: Node) -> _Operand | None:
        """Return how a two-dimensional operand is read; None if by other steps than those of block-gemms."""
        transposed = False
        while node.target in _COPIES or node.target is aten.permute.default:
            if node.target is aten.permute.default:
                if list(node.args[1]) != [1, 0]:  # type: ignore[arg-type]
                    return None
                transposed = not transposed
            node = input_at(node, 0)
        if node.target is not aten.view.default or tensor_of(node).ndim != 2:
            return None
        shape = rows, columns = tensor_of(node).shape
        below = _uncopied(input_at(node, 0))
        if (read := Dequantize.match(below)) is not None:
            return cls(read, rows, columns, 0, transposed)
        if below.target is not aten.permute.default or list(below.args[1]) != [0, 2, 1, 3]:  # type: ignore[arg-type]
            return None
        split = _uncopied(input_at(below, 0))
        read = Dequantize.match(_uncopied(input_at(split, 0))) if split.target is aten.view.default else None
        sizes = tuple(tensor_of(split).shape)
        if read is None or sizes[2] != sizes[3] or (sizes[0] * sizes[2], sizes[1] * sizes[3]) != shape:
            return None
        return cls(read, rows, columns, int(sizes[2]), transposed)

    @property
    def format(self) -> BlockFormat:
        """Return the format along the summed dimension: a square of n x n elements has blocks of n."""
        fmt = find_blocks(self.read.format)
        return replace(fmt, block=self.side) if self.side else fmt

    def sums_columns(self, is_first: bool) -> bool:
        """Return whether a GEMM sums over the columns. Its first operand is (M, K), its second (K, N)."""
        return self.is_transposed != is_first


def _uncopied(node: Node) -> Node:
    while node.target in _COPIES:
        node = input_at(node, 0)
    return node


@dataclass(frozen=True)
class _Product:
    """A product that tensor cores can compute from the codes."""

    node: Node
    operands: tuple[_Operand, _Operand]
    bias: Node | None

    @classmethod
    def of(cls, node: Node) -> _Product | str:
        """Return the product for a GEMM, or the reason why there is none."""
        if node.target is GroupedMm.target:
            return "grouped products of codes are not implemented"
        if node.target in BATCHED:
            return "torch multiplies single matrices in blocks, not batches of them"
        if node.target not in MATMULS or set(node.kwargs) & {"alpha", "beta"}:
            return f"{node.target} is not a plain product of two matrices"
        found = [_Operand.of(factor) for factor in factors_of(node)]
        operands = [operand for operand in found if operand is not None]
        if len(operands) < 2:
            return "one of its operands is not in blocks, or is rearranged before it is multiplied"
        first, second = operands
        return _refusal(first, second, node) or cls(node, (first, second), _bias(node))

    def lower(self, made: _Operands) -> None:
        """Replace the GEMM by the product of codes."""
        node, (first, second) = self.node, self.operands
        dtype = tensor_of(node).dtype
        fused = self.bias if dtype != torch.float32 else None  # cuBLASLt adds no float32 bias
        (a, scale_a), (b, scale_b) = made.of(first, True, node), made.of(second, False, node)
        wholes = first.read.whole, second.read.whole
        with made.graph.inserting_before(node):
            new = ScaledMm(a, b, scale_a, scale_b, *wholes, fused, first.format.name, dtype).insert(made.graph)
            new.meta = dict(node.meta)
            if self.bias is not None and fused is None:
                new = call(made.graph, aten.add.Tensor, new, self.bias)
        substitute(made.graph, node, new)


def _bias(node: Node) -> Node | None:
    return input_at(node, 0) if node.target is aten.addmm.default else None


def _refusal(first: _Operand, second: _Operand, node: Node) -> str | None:
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
    summed, columns = tensor_of(factors_of(node)[0]).shape[1], tensor_of(node).shape[1]
    if columns % UNIT or summed * first.format.bits // 8 % UNIT:
        return f"tensor cores read {UNIT} bytes at once: {summed} summed elements and {columns} columns do not fit"
    bias = _bias(node)
    if bias is not None and tensor_of(bias).ndim != 1:
        return "the added tensor is not a vector"
    return None


@dataclass
class _Operands:
    """Encodes operands in the layout that products read, once for all products that read one."""

    graph: Graph
    made: dict[tuple[Dequantize, bool], tuple[Node, Node]] = field(default_factory=dict)

    def of(self, operand: _Operand, is_first: bool, before: Node) -> tuple[Node, Node]:
        """Return codes (outer, bytes along the summed dimension) and swizzled scales, both uint8."""
        along = operand.sums_columns(is_first)
        key = operand.read, along
        if key not in self.made:
            with self.graph.inserting_before(before):
                self.made[key] = self._encoded(operand, along)
        return self.made[key]

    def _encoded(self, operand: _Operand, along: bool) -> tuple[Node, Node]:
        layout = partial(
            laid_out,
            name=operand.read.format,
            shape=(operand.rows, operand.columns),
            side=operand.side,
            along=along,
        )
        quantize = Quantize.match(operand.read.q)
        if quantize is None:  # records with corrected scales
            function, tensors = partial(_of_records, layout), [operand.read.q]
        else:
            function = partial(_of_numbers, layout, name=quantize.format, row=quantize.row)
            tensors = [quantize.x, quantize.seed, quantize.whole]  # type: ignore[list-item]
        codes, scales = traced_in(self.graph, function, *tensors)
        return codes, scales


def _of_records(layout: partial[tuple[Tensor, Tensor]], records: Tensor) -> tuple[Tensor, Tensor]:
    fmt = find_blocks(layout.keywords["name"])
    return layout(block_codec.from_records(records, fmt))


def _of_numbers(
    layout: partial[tuple[Tensor, Tensor]], x: Tensor, seed: Tensor | None, whole: Tensor | None, name: str, row: int
) -> tuple[Tensor, Tensor]:
    salted = None if seed is None else block_codec.salted(seed, row)
    return layout(block_codec.encode(x, find_blocks(name), whole, salted))


def laid_out(encoded: Encoded, name: str, shape: Sequence[int], side: int, along: bool) -> tuple[Tensor, Tensor]:
    """Return codes (outer, bytes along the summed dimension) and swizzled scales of a matrix, both uint8.

    ``shape`` is (rows, columns) of the encoded matrix. It was encoded in squares of ``side``, or, if ``side`` is 0, in
    blocks along the columns. ``along``: the product sums over the columns, otherwise over the rows.
    """
    fmt, (rows, columns) = find_blocks(name), shape
    scales = encoded.scales.to(torch.uint8)
    if not side:
        return encoded.codes.reshape(rows, columns * fmt.bits // 8), swizzled(scales.view(rows, columns // fmt.block))
    grid, scales = (rows // side, columns // side), scales.view(rows // side, columns // side)
    if along:
        codes = encoded.codes.reshape(*grid, side, side * fmt.bits // 8).permute(0, 2, 1, 3)
        return codes.reshape(rows, columns * fmt.bits // 8), swizzled(scales.repeat_interleave(side, 0))
    elements = block_codec.unpacked(encoded.codes, fmt.bits).view(*grid, side, side).permute(1, 3, 0, 2)
    codes = block_codec.packed(elements.reshape(columns, rows), fmt.bits)
    return codes, swizzled(scales.t().repeat_interleave(side, 0))
