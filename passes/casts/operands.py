"""Round a GEMM's operand to a block format: the nodes that do so, and the shapes that a format takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from fxprec.config.operands import eden_refusal
from fxprec.ir.calls import Call
from fxprec.ir.symbolic import AS_STORED, CorrectScales, Dequantize, Quantize, Rotate, TensorScale
from fxprec.numerics.blocks import BlockFormat
from fxprec.numerics.eden import HEADROOM
from fxprec.passes.analysis.joint import is_backward, shape_text, tensor_of
from fxprec.passes.analysis.marks import mark
from fxprec.passes.casts.seed import draw_seed
from fxprec.passes.sites import emit, emit_call

aten = torch.ops.aten
_IN_BACKWARD = "must_be_in_backward"
"""Without this tag torch's min-cut would rotate a forward value in forward, with another seed drawn there."""


@dataclass(frozen=True)
class Rounding:
    """The way in which one operand of a product is rounded."""

    fmt: BlockFormat
    axis: int
    """The dimension that the product sums over: -1 or -2."""
    is_square: bool = False
    """Whether n x n elements share a scale, instead of n elements along ``axis``."""
    stochastic: bool = False
    rotation: int = 0
    """Size of the step's random Hadamard matrix that multiplies the operand first; 0: no rotation."""
    eden: bool = False
    """Whether the scales of rotated blocks are corrected and rounded at random."""

    @property
    def stored(self) -> BlockFormat:
        """Return the format of the stored blocks: a square of n x n elements is one block."""
        return replace(self.fmt, block=self.fmt.block**2) if self.is_square else self.fmt

    def refusal(self, operand: Node, *, pads: bool = False) -> str | None:
        """Return why an operand cannot have such blocks, or None. ``pads``: its groups are padded to whole blocks."""
        shape = tensor_of(operand).shape
        if any(isinstance(size, torch.SymInt) for size in shape):
            return f"its shape {shape_text(tensor_of(operand))} is dynamic, and blocks are counted at compile time"
        if self.eden and (reason := eden_refusal(self.fmt, self.rotation)):
            return reason
        sizes = (shape[-2], shape[-1]) if self.is_square else (shape[self.axis],)
        odd = None if pads else next((size for size in sizes if size % self.unit), None)
        is_of_block = self.unit == self.fmt.block
        who = f"blocks of {self.fmt.name} need" if is_of_block else "a Hadamard matrix of that size needs"
        return None if odd is None else f"{odd} is not a multiple of {self.unit}, which {who}"

    @property
    def unit(self) -> int:
        """Return the number that the dimension's size must be a multiple of."""
        return max(self.fmt.block, self.rotation)


@dataclass
class OperandCasts:
    """Inserts the casts of one graph's operands. GEMMs that read an operand with the same rounding share its cast."""

    graph: Graph
    table: Node
    storage: str
    made: dict[tuple[Node, Rounding, bool], Node] = field(default_factory=dict)
    seed: Node | None = None
    rows: int = AS_STORED
    """The last row that was handed out, below `AS_STORED`. Each row gives other random bits."""

    def new_row(self) -> int:
        """Return a row that no site has."""
        self.rows -= 1
        return self.rows

    def rounded(self, operand: Node, how: Rounding, gemm: Node, of: tuple[int, int]) -> Node:
        """Return the rounded operand for ``gemm``; ``of`` is the value of `Marks.operand_of`.

        Call this for GEMMs in graph order.
        """
        key = operand, how, is_backward(gemm)
        if key not in self.made:
            if how.stochastic or how.rotation:
                self.seed = self.seed or draw_seed(self.graph, gemm)
            with self.graph.inserting_before(gemm):
                self.made[key] = _Cast(self, gemm, how, of).of(operand)
        return self.made[key]


@dataclass(frozen=True)
class _Cast:
    """Inserts the nodes that round one operand in front of a GEMM."""

    casts: OperandCasts
    gemm: Node
    how: Rounding
    gemm_of: tuple[int, int]

    def of(self, x: Node) -> Node:
        if self.how.is_square:
            # Transposition does not change a square's scale, so round in the layout that needs no copy.
            return self._transposed(x, self._in_squares) if _is_transposed(tensor_of(x)) else self._in_squares(x)
        return self._transposed(x, self._rounded) if self.how.axis == -2 else self._rounded(x)

    def _transposed(self, x: Node, cast: Callable[[Node], Node]) -> Node:
        return self._swap(cast(self._swap(x, -1, -2)), -1, -2)

    def _in_squares(self, x: Node) -> Node:
        """Make each square's elements contiguous and round: (.., R, C) as (.., R / n, C / n, n, n)."""
        *batch, rows, columns = tensor_of(x).shape
        n = self.how.fmt.block
        split = self._view(x, [*batch, rows // n, n, columns // n, n])
        return self._view(self._swap(self._rounded(self._swap(split, -2, -3)), -2, -3), [*batch, rows, columns])

    def _rounded(self, x: Node) -> Node:
        """Encode ``x`` in blocks of its last dimension, or of its last two, and decode it."""
        how, casts = self.how, self.casts
        fmt, row, dtype = how.stored, casts.new_row(), tensor_of(x).dtype
        if how.rotation:
            assert casts.seed is not None
            x = self._emit_call(Rotate(x, casts.seed, how.rotation))
            x.meta["partitioner_tag"] = _IN_BACKWARD
        whole = self._emit_call(TensorScale(x, fmt.name)) if fmt.tensor_scale else None
        if whole is not None and how.eden:
            whole = emit(casts.graph, aten.mul.Tensor, (whole, HEADROOM), self.gemm)
        seed = casts.seed if how.stochastic else None
        q = self._emit_call(Quantize(x, casts.table, row, fmt.name, casts.storage, seed, whole))
        mark(q, operand_of=self.gemm_of)
        if how.eden:
            assert casts.seed is not None
            q = self._emit_call(CorrectScales(q, x, whole, casts.seed, row, fmt.name, how.rotation))
        elements, shape = tensor_of(x).numel(), list(tensor_of(x).shape)
        read = Dequantize(q, casts.table, AS_STORED, fmt.name, casts.storage, dtype, elements, whole)
        return self._view(self._emit_call(read), shape)

    def _emit_call(self, call: Call) -> Node:
        return emit_call(self.casts.graph, call, self.gemm)

    def _swap(self, x: Node, a: int, b: int) -> Node:
        order = list(range(tensor_of(x).ndim))
        order[a], order[b] = order[b], order[a]
        return emit(self.casts.graph, aten.permute.default, (x, order), self.gemm)

    def _view(self, x: Node, shape: Sequence[int]) -> Node:
        val = tensor_of(x)
        if not val.is_contiguous():
            options = {"memory_format": torch.contiguous_format}
            x = emit(self.casts.graph, aten.clone.default, (x,), self.gemm, kwargs=options, val=val.contiguous())
        return emit(self.casts.graph, aten.view.default, (x, list(shape)), self.gemm)


def _is_transposed(val: torch.Tensor) -> bool:
    return not val.is_contiguous() and val.mT.is_contiguous()
