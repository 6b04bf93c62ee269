"""Products of operands in blocks on tensor cores that scale: `torch.nn.functional.scaled_mm`, `scaled_grouped_mm`.

Inductor's lowering of ``aten::_scaled_mm_v2`` refuses swizzled scales (torch 2.13), so the calls are operators of
fxprec's. On a CPU they are computed from the arguments that torch would get (`fxprec.runtime.scaled_mm`).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.compat.scaled_mm import MX, NV, NV_ONE_SCALE, Scaling
from fxprec.ir.calls import Call, FakeCall
from fxprec.ir.grouped import padded_rows
from fxprec.numerics.blocks import E2M1, BlockFormat
from fxprec.numerics.formats import E4M3FN
from fxprec.numerics.swizzle import BLOCKS, ROWS


def _product(call: FakeCall) -> object:
    return call.a.new_empty(call.a.shape[0], call.b.shape[0], dtype=call.dtype)


class ScaledMm(Call, op="scaled_mm", fake=_product):
    """Multiply operands in blocks, and add ``bias`` (N,): the result is (M, N) in ``dtype``.

    ``a`` (M, bytes) and ``b`` (N, bytes) are codes, each row along the summed dimension. ``scale_a`` and ``scale_b``
    are the scales of their blocks in the layout of `fxprec.numerics.swizzle`; all are uint8. ``whole_a`` and
    ``whole_b`` are float32 (1,) scales of the tensors, for formats that have one.
    """

    a: Node
    b: Node
    scale_a: Node
    scale_b: Node
    whole_a: Node | None
    whole_b: Node | None
    bias: Node | None
    format: str
    dtype: torch.dtype


def _grouped_product(call: FakeCall) -> object:
    groups = call.offs.shape if call.b.ndim == 2 else ()
    return call.a.new_empty((*groups, call.a.shape[0], call.b.shape[-2]), dtype=torch.bfloat16)


class ScaledGroupedMm(Call, op="scaled_grouped_mm", fake=_grouped_product):
    """Multiply the tokens of each of G groups, in blocks, by the group's matrix or by its tokens of the other operand.

    ``a`` (T, bytes) and ``b`` (G, N, bytes) give (T, N): a row of ``a`` is a token, and group i has those from
    ``offs[i - 1]`` to ``offs[i]``. ``a`` (M, bytes) and ``b`` (N, bytes) give (G, M, N): tokens lie along the rows of
    both, and groups begin at whole blocks. Results are bfloat16; tokens beyond the last group give 0. Scales of tokens
    are those of `SwizzledGroups`, those of ``b`` (G, N, bytes) are (G, tiles).
    """

    a: Node
    b: Node
    scale_a: Node
    scale_b: Node
    whole_a: Node | None
    whole_b: Node | None
    offs: Node
    format: str


def _tiles_of_groups(call: FakeCall) -> object:
    groups, (rows, blocks) = call.offs.shape[0], call.scales.shape
    if call.block:
        return call.scales.new_empty((-(-rows // ROWS) * ROWS, padded_rows(blocks, groups, BLOCKS)))
    return call.scales.new_empty((padded_rows(rows, groups, ROWS), -(-blocks // BLOCKS) * BLOCKS))


class SwizzledGroups(Call, op="swizzled_groups", fake=_tiles_of_groups):
    """Lay out each group's scales of ``scales`` (rows, blocks) as `fxprec.numerics.swizzle` does, group after group.

    Each row is a token if ``block`` is 0, and each block is ``block`` tokens otherwise. ``offs`` (G,) are the ends of
    the groups in tokens. What is padded is 0.
    """

    scales: Node
    offs: Node
    block: int


def scaling_of(fmt: BlockFormat) -> Scaling | None:
    """Return how torch multiplies a format with blocks along the summed dimension; None if it cannot."""
    known: dict[object, Scaling] = {
        (E4M3FN, 32, "e8m0", False): MX,
        (E4M3FN, 32, "e8m0up", False): MX,
        (E2M1, 16, "e4m3fn", True): NV,
        (E2M1, 16, "e4m3fn", False): NV_ONE_SCALE,
    }
    return known.get((fmt.element, fmt.block, fmt.scale, fmt.tensor_scale))
