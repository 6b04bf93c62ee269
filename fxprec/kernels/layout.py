"""Operators that write tensors in the layout that kernels need.

``laid_out(x, dtype, channels_last) -> y``
    On CPUs, a convolution's weights or their gradient, in float32 or bfloat16 and in the layout of the next reader:
    channels-last if ``channels_last``, otherwise contiguous.
``side_by_side(pieces) -> x``
    The pieces joined along the last dimension, each written in place by the kernel that computes it.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, FakeCall, Tensors
from fxprec.kernels.casts import KERNEL_TAGS

LAID_OUT_DTYPES = frozenset({torch.float32, torch.bfloat16})
"""Dtypes between which a compiled kernel converts."""


def _laid_out(call: FakeCall) -> torch.Tensor:
    layout = torch.channels_last if call.channels_last else torch.contiguous_format
    return torch.empty_like(call.x, dtype=call.dtype, memory_format=layout)


class LaidOut(Call, op="laid_out", fake=_laid_out, tags=KERNEL_TAGS):
    """Convert a convolution's weight, or its gradient, to a dtype and a memory format."""

    x: Node
    dtype: torch.dtype
    channels_last: bool


class SideBySide(Call, op="side_by_side", fake=lambda call: torch.cat(list(call.pieces), -1)):
    """Join pieces along the last dimension; each piece's kernel writes into the whole."""

    pieces: Tensors
