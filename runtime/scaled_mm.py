"""Multiply operands in block formats: by torch on a GPU, by a slow reference with the same arguments on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fxprec.compat.scaled_mm import Arguments, Scaling
from fxprec.kernels.scaled_mm import ScaledGroupedMm, ScaledMm, SwizzledGroups, scaling_of
from fxprec.numerics.blocks import E2M1, find_blocks
from fxprec.numerics.reference import reference_decode
from fxprec.numerics.swizzle import BLOCKS, ROWS, places, swizzled
from fxprec.runtime.grouped_mm import groups_of, pad_groups, padded_ends, zeroed_beyond

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
    arguments = Arguments.of(_scaling(format), (a, b), (scale_a, scale_b), (whole_a, whole_b))
    return arguments.multiply(bias, dtype) if a.is_cuda else interpreted(arguments, bias, dtype)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    whole_a: Tensor | None,
    whole_b: Tensor | None,
    offs: Tensor,
    format: str,
) -> Tensor:
    """Return the product of each group's codes: (T, N) of ``b`` (G, N, bytes), (G, M, N) of ``b`` (N, bytes)."""
    arguments = Arguments.of(_scaling(format), (a, b), (scale_a, scale_b), (whole_a, whole_b), offs)
    if not a.is_cuda:
        return interpreted_groups(arguments)
    out = arguments.multiply(None, torch.bfloat16)
    return out if out.ndim == 3 else zeroed_beyond(out, offs, 0)


def _scaling(format: str) -> Scaling:
    found = scaling_of(find_blocks(format))
    assert found is not None, f"{format} is not multiplied in blocks"
    return found


def swizzled_groups(scales: Tensor, offs: Tensor, block: int) -> Tensor:
    """Return the tiles of each group's scales, group after group. See `fxprec.kernels.scaled_mm.SwizzledGroups`."""
    if not block:
        padded = pad_groups(scales, offs, ROWS)  # a group fills whole rows of tiles, so groups follow each other
        return swizzled(padded).view(padded.shape[0], -1)
    offs = offs // block
    padded = pad_groups(scales.t(), offs, BLOCKS).t()
    tiles = swizzled(padded).view(-1, padded.shape[1] // BLOCKS, ROWS * BLOCKS)
    ends = padded_ends(offs, BLOCKS) // BLOCKS
    rows, columns, _ = tiles.shape
    place = torch.arange(rows * columns, device=scales.device)
    group = torch.searchsorted(ends * rows, place, right=True).clamp_(max=ends.shape[0] - 1)
    begin = torch.cat([ends.new_zeros(1), ends[:-1]])[group]
    width = (ends[group] - begin).clamp_(min=1)
    inside = place - begin * rows
    row, column = inside // width, begin + inside % width
    is_tile = row < rows
    source = torch.where(is_tile, row * columns + column, 0)
    found = torch.where(is_tile[:, None], tiles.flatten(0, 1)[source], 0)
    return found.view(rows * ROWS, padded.shape[1])


def interpreted(given: Arguments, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the result of `F.scaled_mm` for its arguments, summed in float64 and rounded once."""
    product = _product(given, given.mat_a, given.mat_b.t(), given.scale_a, given.scale_b)
    return (product if bias is None else product + bias.double()).to(dtype)


def interpreted_groups(given: Arguments) -> Tensor:
    """Return the result of `F.scaled_grouped_mm` for its arguments, and 0 beyond the last group.

    Group by group, from the definition: the scales of a group are those of a matrix of its own.
    """
    a, b, offs = given.mat_a, given.mat_b.mT, given.offs
    assert offs is not None, "a grouped product has groups"
    is_sum, block = b.ndim == 2, _BLOCKS[given.recipe[0]]
    shape = (len(offs), a.shape[0], b.shape[0]) if is_sum else (a.shape[0], b.shape[1])
    out = a.new_zeros(shape, dtype=torch.bfloat16)
    flat_a, flat_b = given.scale_a[0].flatten(), given.scale_b[0]
    begin_a = begin_b = 0
    for i, tokens in enumerate(groups_of(offs)):
        wholes = [x[i] for x in given.scale_a[1:]], [x[i] for x in given.scale_b[1:]]
        if is_sum:
            held = slice(tokens.start // _codes_per_byte(a), tokens.stop // _codes_per_byte(a))
            blocks = (tokens.stop - tokens.start) // block
            scales = flat_a[begin_a:], flat_b.flatten()[begin_b:]
            product = _product(given, a[:, held], b[:, held], [scales[0], *wholes[0]], [scales[1], *wholes[1]])
            out[i] = product
            begin_a += _tiled(a.shape[0], blocks)
            begin_b += _tiled(b.shape[0], blocks)
        else:
            scales = flat_a[begin_a:], flat_b[i]
            product = _product(given, a[tokens], b[i], [scales[0], *wholes[0]], [scales[1], *wholes[1]])
            out[tokens] = product
            begin_a += _tiled(tokens.stop - tokens.start, a.shape[1] * _codes_per_byte(a) // block)
    return out


def _tiled(rows: int, blocks: int) -> int:
    """Return the number of scales in the tiles of a matrix."""
    return -(-rows // ROWS) * ROWS * (-(-blocks // BLOCKS) * BLOCKS)


def _codes_per_byte(codes: Tensor) -> int:
    return 2 if codes.dtype == torch.float4_e2m1fn_x2 else 1


def _product(given: Arguments, a: Tensor, b: Tensor, scale_a: Sequence[Tensor], scale_b: Sequence[Tensor]) -> Tensor:
    """Return the product of a matrix (M, K) and a matrix (N, K) of codes, (M, N) float64."""
    return _decoded(a, scale_a, given).double() @ _decoded(b, scale_b, given).double().t()


def _decoded(codes: Tensor, scales: Sequence[Tensor], given: Arguments) -> Tensor:
    """Return an operand's numbers, (rows, K) float32."""
    assert codes.stride()[1] == 1, "the summed dimension is contiguous"
    elements = _two_a_byte(codes) if codes.dtype == torch.float4_e2m1fn_x2 else codes.float()
    block = _BLOCKS[given.recipe[0]]
    rows, blocks = elements.shape[0], elements.shape[1] // block
    assert given.swizzle[0] == F.SwizzleType.SWIZZLE_32_4_4
    factors = scales[0].float().flatten()[places(rows, blocks).flatten().to(codes.device)].view(rows, blocks, 1)
    for whole in scales[1:]:
        factors = factors * whole
    return (elements.view(rows, blocks, block) * factors).view(elements.shape)


def _two_a_byte(codes: Tensor) -> Tensor:
    pairs = codes.view(torch.uint8)
    return reference_decode(torch.stack([pairs & 15, pairs >> 4], -1).flatten(1), E2M1)


ScaledMm.implement(scaled_mm, "CPU", "CUDA")
ScaledGroupedMm.implement(scaled_grouped_mm, "CPU", "CUDA")
SwizzledGroups.implement(swizzled_groups, "CPU", "CUDA")
