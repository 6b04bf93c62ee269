"""MS-EDEN: correct the scales of blocks so that a randomly rotated vector is unbiased (arXiv 2601.22813).

A vector x of 16 to 128 rotated elements is rounded to nearest as Q. EDEN (arXiv 2108.08842) multiplies Q by
<x, x> / <x, Q>, so that its projection on x is x. Here the factor multiplies the vector's block scales, which are then
rounded stochastically to their format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics import block_codec, codec, directed
from fxprec.numerics.blocks import find_blocks
from fxprec.numerics.rows import code_row, format_row

HEADROOM = 1.75
"""448 / 256: factor of a tensor's scale, so that no corrected block scale exceeds e4m3fn's largest number."""


def corrected(q: Tensor, x: Tensor, whole: Tensor | None, seed: Tensor, row: int, format: str, size: int) -> Tensor:
    """Return ``q``, the records of ``x`` rounded to nearest, with corrected scales: one factor per ``size`` elements.

    Each ``row`` draws different random bits from ``seed`` (1,) int32. A vector that was rounded to 0 stays 0.
    """
    fmt = find_blocks(format)
    form = block_codec.scale_format(fmt)
    rows = format_row(form), code_row(form)
    codes, scales, _ = block_codec.from_records(q, fmt)
    rounded = block_codec.decode(block_codec.Encoded(codes, scales, None), fmt, x.numel(), whole).view(-1, size)
    turned = x.to(torch.float32).reshape(-1, size)
    # Scale magnitudes to at most 1, since float32 cannot hold the squares of 1e-20 and 1e20.
    largest = torch.clamp_min(torch.amax(turned.abs(), 1, keepdim=True), 2.0**-126)
    turned = turned / largest
    kept = torch.sum(turned * (rounded / largest), 1, keepdim=True)
    factor = torch.where(kept == 0, 1.0, torch.sum(turned * turned, 1, keepdim=True) / kept)
    wanted = codec.numbers(scales, *rows).view(-1, size // fmt.block) * factor
    at = torch.arange(scales.numel(), device=q.device).to(torch.int32).view(wanted.shape)
    drawn = directed.dithered(wanted, block_codec.random_bits(at, block_codec.salted(seed, row)), rows[0])
    fresh = codec.codes(drawn, *rows).view(scales.shape)
    return block_codec.records(block_codec.Encoded(codes, fresh, None), fmt)
