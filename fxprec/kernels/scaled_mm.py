"""Products of operands in blocks on tensor cores that scale: `torch.nn.functional.scaled_mm`.

Inductor's lowering of ``aten::_scaled_mm_v2`` refuses swizzled scales (torch 2.13), so the call is an operator of
fxprec's. On a CPU it is computed from the arguments that torch would get (`fxprec.runtime.scaled_mm`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxprec.compat.scaled_mm import MX, NV, NV_ONE_SCALE, Scaling
from fxprec.ir.calls import Call, FakeCall
from fxprec.numerics.blocks import E2M1, BlockFormat
from fxprec.numerics.formats import E4M3FN


def _product(call: FakeCall) -> Any:
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


def scaling_of(fmt: BlockFormat) -> Scaling | None:
    """Return how torch multiplies a format with blocks along the summed dimension; None if it cannot."""
    known: dict[object, Scaling] = {
        (E4M3FN, 32, "e8m0", False): MX,
        (E4M3FN, 32, "e8m0up", False): MX,
        (E2M1, 16, "e4m3fn", True): NV,
        (E2M1, 16, "e4m3fn", False): NV_ONE_SCALE,
    }
    return known.get((fmt.element, fmt.block, fmt.scale, fmt.tensor_scale))
