"""Multiply operands in block formats: by torch on a GPU, by a slow reference with the same arguments on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fxprec.compat.scaled_mm import Arguments
from fxprec.kernels.scaled_mm import ScaledMm, scaling_of
from fxprec.numerics.blocks import E2M1, find_blocks
from fxprec.numerics.reference import reference_decode
from fxprec.numerics.swizzle import places

_BLOCKS = {F.ScalingType.BlockWise1x32: 32, F.ScalingType.BlockWise1x16: 16}


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    whole_a: Tensor | None,
    whole_b: Tensor | None,
    bias: Tensor | None,
    format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product (M, N) of codes ``a`` (M, bytes) and ``b`` (N, bytes), with ``bias`` added."""
    scaling = scaling_of(find_blocks(format))
    assert scaling is not None, f"{format} is not multiplied in blocks"
    arguments = Arguments.of(scaling, (a, b), (scale_a, scale_b), (whole_a, whole_b))
    return arguments.multiply(bias, dtype) if a.is_cuda else interpreted(arguments, bias, dtype)


def interpreted(given: Arguments, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the result of `F.scaled_mm` for its arguments, summed in float64 and rounded once."""
    a, b = _decoded(given.mat_a, given.scale_a, given), _decoded(given.mat_b.t(), given.scale_b, given)
    product = a.double() @ b.double().t()
    return (product if bias is None else product + bias.double()).to(dtype)


def _decoded(codes: Tensor, scales: list[Tensor], given: Arguments) -> Tensor:
    """Return an operand's numbers, (rows, K) float32."""
    assert codes.stride()[1] == 1, "the summed dimension is contiguous"
    elements = _two_a_byte(codes) if codes.dtype == torch.float4_e2m1fn_x2 else codes.float()
    block = _BLOCKS[given.recipe[0]]
    rows, blocks = elements.shape[0], elements.shape[1] // block
    assert given.swizzle[0] == F.SwizzleType.SWIZZLE_32_4_4
    factors = scales[0].float().flatten()[places(rows, blocks).flatten().to(codes.device)].view(rows, blocks, 1)
    for whole in scales[1:]:
        factors = factors * whole
    return (elements.view(rows, blocks, block) * factors).view(rows, -1)


def _two_a_byte(codes: Tensor) -> Tensor:
    pairs = codes.view(torch.uint8)
    return reference_decode(torch.stack([pairs & 15, pairs >> 4], -1).flatten(1), E2M1)


ScaledMm.implement(scaled_mm, "CPU", "CUDA")
