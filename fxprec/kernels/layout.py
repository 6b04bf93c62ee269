"""Operators that write tensors in the layout that kernels need."""

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
    """Convert a convolution's weight on a CPU, or its gradient, to a dtype and the layout of its next reader.

    The dtype is float32 or bfloat16. The layout is channels-last if ``channels_last``, otherwise contiguous.
    """

    x: Node
    dtype: torch.dtype
    channels_last: bool


class SideBySide(Call, op="side_by_side", fake=lambda call: torch.cat(list(call.pieces), -1)):
    """Join pieces along the last dimension; the kernel that computes a piece writes it in place into the whole."""

    pieces: Tensors
