"""Encode in the 8-bit codecs by a Triton kernel: binary search over the borders. Indexing by torch decodes.

Source: Dettmers 2016, section 3.2. `fxprec.runtime.aps.codecs` defines the codes that the kernel returns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxprec.numerics import ahead
from fxprec.runtime import on_device
from fxprec.runtime.aps.codecs import Codec, thresholds

_BLOCK = 1024
_SEARCH_STEPS = 7  # 127 borders


@triton.jit
def _encode_kernel(
    x_ptr: tl.tensor, borders_ptr: tl.tensor, out_ptr: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr, STEPS: tl.constexpr
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    magnitude = tl.abs(x)
    # Count the borders below the magnitude. NaN compares with no border, and counts as beyond all.
    index = tl.zeros([BLOCK], dtype=tl.int32)
    step = 64
    for _ in tl.static_range(STEPS):
        border = tl.load(borders_ptr + index + (step - 1))
        index = tl.where((magnitude > border) | (magnitude != magnitude), index + step, index)
        step = step // 2
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 0x80
    tl.store(out_ptr + at, (index | sign).to(tl.uint8), mask=inside)


def encode_values(x: Tensor, c: Codec) -> Tensor:
    """Return codes (uint8, shape of `x`) of values in the table's range, as `codecs.encode_values`."""
    values = x.detach().to(torch.float32).contiguous()
    out = torch.empty(values.shape, dtype=torch.uint8, device=x.device)
    if values.numel():
        grid = (triton.cdiv(values.numel(), _BLOCK),)
        borders = thresholds(c, x.device)
        with on_device.current(x.device):
            _encode_kernel[grid](values, borders, out, values.numel(), BLOCK=_BLOCK, STEPS=_SEARCH_STEPS)
    return out


def compile_to_ptx(arch: int) -> str:
    """Return PTX of the kernel for an NVIDIA architecture (80, 89, 90, 100), without a GPU."""
    pointers = {"x_ptr": "*fp32", "borders_ptr": "*fp32", "out_ptr": "*u8", "n": "i32"}
    encode = ahead.compile_for(_encode_kernel, pointers, {"BLOCK": _BLOCK, "STEPS": _SEARCH_STEPS}, arch)
    return str(encode.asm["ptx"])
