"""Grouped matrix products, one for each projection of a mixture of experts: declarations and gradients.

`fxprec.runtime.grouped_mm` registers the implementations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxprec.ir.calls import Call, FakeCall


def product_like(call: FakeCall) -> Tensor:
    """Return an uninitialised tensor for the product of a call. Raises `ValueError` for other dtypes or dimensions."""
    a, b, offs = call.a, call.b, call.offs
    if a.dtype != b.dtype:
        raise ValueError(f"a grouped product multiplies {a.dtype} by {b.dtype}; give both operands one dtype")
    if (a.ndim, b.ndim) not in ((2, 3), (3, 2), (2, 2)):
        raise ValueError(f"a grouped product has operands of 2 and 3 dimensions, not of {a.ndim} and {b.ndim}")
    groups = offs.shape if a.ndim == b.ndim else ()
    made: Tensor = a.new_empty((*groups, a.shape[-2], b.shape[-1]))
    return made


class GroupedMm(Call, op="grouped_mm", fake=product_like):
    """Multiply the tokens of each of G groups by the group's matrix, or by the group's tokens of the other operand.

    Both operands have one dtype. Group i has the tokens from ``offs[i - 1]`` (0 for the first) to ``offs[i]``, where
    ``offs`` (G,) are integers that do not decrease. In each operand of two dimensions, one dimension is the tokens:
    (T, K) by (G, K, N) is (T, N), (G, M, K) by (K, T) is (M, T), (K, T) by (T, N) is (G, K, N). Tokens beyond the last
    group give 0; ``aten::_grouped_mm`` leaves them unwritten.
    """

    a: Node
    b: Node
    offs: Node


def _padded(call: FakeCall) -> Tensor:
    rows, width = call.x.shape
    made: Tensor = call.x.new_empty((padded_rows(rows, call.offs.shape[0], call.unit), width))
    return made


def padded_rows(rows: int, groups: int, unit: int) -> int:
    """Return the most rows that groups of ``rows`` tokens take if each group is padded to a multiple of ``unit``."""
    return (rows + groups * (unit - 1) + unit - 1) // unit * unit


class PadGroups(Call, op="pad_groups", fake=_padded):
    """Write zeros after each group of rows (T, K), so that each group begins at a multiple of ``unit``.

    Rows beyond the last group are 0. The result has T + G (unit - 1) rows, rounded up to a multiple of ``unit``, which
    is the most that any groups need.
    """

    x: Node
    offs: Node
    unit: int


class PaddedEnds(Call, op="padded_ends", fake=lambda call: torch.empty_like(call.offs)):
    """Return the ends of the groups in the result of `PadGroups`."""

    offs: Node
    unit: int


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients, each a grouped product; that of a transposed view ``b`` is a transposed view too."""
    a, b, offs = ctx.saved_tensors
    wants_a, wants_b, _ = ctx.needs_input_grad
    multiply = torch.ops.fxprec.grouped_mm
    of_a = multiply(gradient, b.mT, offs) if wants_a else None
    of_b = None
    if wants_b:
        is_transposed = b.stride(-2) == 1 and b.stride(-1) != 1
        of_b = multiply(gradient.mT, a, offs).mT if is_transposed else multiply(a.mT, gradient, offs)
    return of_a, of_b, None


torch.library.register_autograd("fxprec::grouped_mm", _gradients, setup_context=_save)
