"""Encode operands in blocks as tensor cores read them: rows of codes along the summed dimension, swizzled scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxprec.ir.symbolic import Dequantize, Quantize, is_in_blocks
from fxprec.kernels.scaled_mm import SwizzledGroups
from fxprec.numerics import block_codec
from fxprec.numerics.block_codec import Encoded
from fxprec.numerics.blocks import BlockFormat, find_blocks
from fxprec.numerics.swizzle import swizzled
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import input_at, tensor_of
from fxprec.passes.lowering.blocks import traced_in

aten = torch.ops.aten
_COPIES = frozenset({ops.CONVERT, aten.clone.default})


def is_from_blocks(operand: Node) -> bool:
    """Return whether an operand is read from blocks, seen through views and copies."""
    return any(read.target is Dequantize.target and is_in_blocks(read) for read in _chain(operand))


def _chain(node: Node) -> Iterator[Node]:
    """Yield a node and the nodes that it is a view or a copy of, up to one that reads codes."""
    yield node
    while node.target in ops.VIEWS | _COPIES and node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node


@dataclass(frozen=True)
class BlockOperand:
    """A matrix, or one matrix for each expert, that is decoded from rows or squares of blocks."""

    read: Dequantize
    shape: tuple[int, ...]
    """(rows, columns) as the matrix was encoded; (experts, rows, columns) if there is one for each expert."""
    side: int
    """Side of a square that shares a scale; 0: blocks lie along the columns."""
    is_transposed: bool
    """Whether the GEMM reads the transposed matrix."""

    @classmethod
    def of(cls, node: Node) -> BlockOperand | None:
        """Return how an operand is read; None if by other steps than those of block-gemms."""
        transposed = False
        while node.target in _COPIES or node.target is aten.permute.default:
            if node.target is aten.permute.default:
                if list(node.args[1]) != _swapped(tensor_of(node).ndim, -1, -2):  # type: ignore[arg-type]
                    return None
                transposed = not transposed
            node = input_at(node, 0)
        if node.target is not aten.view.default or tensor_of(node).ndim not in (2, 3):
            return None
        shape = *batch, rows, columns = tuple(tensor_of(node).shape)
        below = _uncopied(input_at(node, 0))
        if (read := Dequantize.match(below)) is not None:
            return cls(read, shape, 0, transposed)
        if below.target is not aten.permute.default or list(below.args[1]) != _swapped(len(shape) + 2, -2, -3):  # type: ignore[arg-type]
            return None
        split = _uncopied(input_at(below, 0))
        read = Dequantize.match(_uncopied(input_at(split, 0))) if split.target is aten.view.default else None
        sizes = list(tensor_of(split).shape)
        side = int(sizes[-1])
        if read is None or sizes != [*batch, rows // side, columns // side, side, side]:
            return None
        return cls(read, shape, side, transposed)

    @property
    def format(self) -> BlockFormat:
        """Return the format along the summed dimension: a square of n x n elements has blocks of n."""
        fmt = find_blocks(self.read.format)
        return replace(fmt, block=self.side) if self.side else fmt

    def sums_columns(self, is_first: bool) -> bool:
        """Return whether a GEMM sums over the columns. Its first operand is (M, K), its second (K, N)."""
        return self.is_transposed != is_first


def _swapped(ndim: int, a: int, b: int) -> list[int]:
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return order


def _uncopied(node: Node) -> Node:
    while node.target in _COPIES:
        node = input_at(node, 0)
    return node


@dataclass(frozen=True)
class Groups:
    """The groups of tokens in an operand of a grouped product."""

    ends: Node
    """The ends of the groups."""
    are_summed: bool
    """Whether the product sums over each group's tokens; otherwise each row is a token."""


@dataclass
class Encoder:
    """Encodes the operands of one graph's products, once for all products that read one in the same way."""

    graph: Graph
    made: dict[tuple[Dequantize, bool, Groups | None], tuple[Node, Node]] = field(default_factory=dict)

    def of(
        self, operand: BlockOperand, is_first: bool, before: Node, groups: Groups | None = None
    ) -> tuple[Node, Node]:
        """Return codes (.., outer, bytes along the summed dimension) and swizzled scales, both uint8."""
        along = operand.sums_columns(is_first)
        key = operand.read, along, groups
        if key not in self.made:
            with self.graph.inserting_before(before):
                self.made[key] = self._encoded(operand, along, groups)
        return self.made[key]

    def _encoded(self, operand: BlockOperand, along: bool, groups: Groups | None) -> tuple[Node, Node]:
        *batch, rows, columns = operand.shape
        is_turned = bool(operand.side) and not along
        layout = partial(
            laid_out,
            name=operand.read.format,
            shape=(*batch, columns, rows) if is_turned else operand.shape,
            side=operand.side,
            is_swizzled=groups is None,
        )
        quantize = Quantize.match(operand.read.q)
        if quantize is None:  # records with corrected scales, which are rows
            function, tensors = partial(_of_records, layout), [operand.read.q]
        else:
            function = partial(_of_numbers, layout, is_turned=is_turned, name=quantize.format, row=quantize.row)
            tensors = [quantize.x, quantize.seed, quantize.whole]  # type: ignore[list-item]
        codes, scales = traced_in(self.graph, function, *tensors)
        if groups is not None:
            block = operand.format.block if groups.are_summed else 0
            scales = SwizzledGroups(scales, groups.ends, block).insert(self.graph)
        return codes, scales


def _of_records(layout: partial[tuple[Tensor, Tensor]], records: Tensor) -> tuple[Tensor, Tensor]:
    fmt = find_blocks(layout.keywords["name"])
    return layout(block_codec.from_records(records, fmt))


def _of_numbers(
    layout: partial[tuple[Tensor, Tensor]],
    x: Tensor,
    seed: Tensor | None,
    whole: Tensor | None,
    is_turned: bool,
    name: str,
    row: int,
) -> tuple[Tensor, Tensor]:
    """Encode the numbers; the transposed matrix if ``is_turned``, whose squares have the same scales."""
    salted = None if seed is None else block_codec.salted(seed, row)
    turned = x.transpose(-1, -2).transpose(-3, -4) if is_turned else x
    return layout(block_codec.encode(turned, find_blocks(name), whole, salted))


def laid_out(
    encoded: Encoded, name: str, shape: Sequence[int], side: int = 0, is_swizzled: bool = True
) -> tuple[Tensor, Tensor]:
    """Return codes (.., rows, bytes) and scales of matrices whose columns the product sums over, both uint8.

    ``shape`` is (.., rows, columns) of the encoded matrices. They were encoded in squares of ``side``, or, if ``side``
    is 0, in blocks along the columns. Scales are those of `fxprec.numerics.swizzle`, or (.., rows, blocks) if
    ``is_swizzled`` is False.
    """
    fmt, (*batch, rows, columns) = find_blocks(name), shape
    scales = encoded.scales.to(torch.uint8)
    if side:
        grid = (*batch, rows // side, columns // side)
        codes = encoded.codes.reshape(*grid, side, side * fmt.bits // 8).transpose(-3, -2)
        scales = scales.view(grid).repeat_interleave(side, -2)
    else:
        codes, scales = encoded.codes, scales.view(*batch, rows, columns // fmt.block)
    return codes.reshape(*batch, rows, columns * fmt.bits // 8), swizzled(scales) if is_swizzled else scales
