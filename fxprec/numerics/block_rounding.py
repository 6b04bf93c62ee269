"""`quantize`, `encode` and `decode` of block formats, on plain tensors of any shape, layout and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxprec.errors import FormatError
from fxprec.numerics import block_codec
from fxprec.numerics.block_codec import Encoded
from fxprec.numerics.blocks import BlockFormat


@dataclass(frozen=True)
class BlockCodes:
    """A tensor in a block format: blocks of its elements in row-major order, the last padded with the last element."""

    codes: torch.Tensor
    """uint8: the elements' packed codes in order, the first in the lowest bits."""
    scales: torch.Tensor
    """One per block, in ``fmt.scale_dtype``."""
    offsets: torch.Tensor | None
    """bfloat16, one per block; None unless elements are integers."""
    tensor_scale: torch.Tensor | None
    """float32 (1,), if the format has one."""
    shape: torch.Size
    """Shape of the tensor that was encoded."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes, scales and offsets: ``fmt.num_bytes(elements)``."""
        parts = (self.codes, self.scales, self.offsets, self.tensor_scale)
        return sum(part.nbytes for part in parts if part is not None)


def encode_blocks(
    x: torch.Tensor, fmt: BlockFormat, rounding: str = "nearest", generator: torch.Generator | None = None
) -> BlockCodes:
    """Return ``x`` in blocks. Raises `FormatError` for a rounding other than nearest and stochastic."""
    if rounding == "zero":
        raise FormatError(f"rounding='zero' has no meaning in blocks of {fmt.name}; use 'nearest' or 'stochastic'")
    with torch.no_grad():
        seed = drawn_seed(x.device, generator) if rounding == "stochastic" else None
        whole = block_codec.tensor_scale(x, fmt) if fmt.tensor_scale else None
        codes, scales, offsets = block_codec.encode(x, fmt, whole, seed)
        shown = None if offsets is None else _shown(offsets, fmt.scale_dtype)
        return BlockCodes(codes.view(-1), _shown(scales, fmt.scale_dtype), shown, whole, x.shape)


def _shown(code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return int32 codes as numbers of their dtype."""
    return code.view(-1).to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)


def _codes(shown: torch.Tensor) -> torch.Tensor:
    code = shown.view(torch.uint8 if shown.itemsize == 1 else torch.int16).to(torch.int32).view(-1, 1)
    return code & 0xFFFF


def decode_blocks(code: BlockCodes, fmt: BlockFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers, rounded to ``dtype`` once. Raises `FormatError` if the parts do not fit this format."""
    _check(code, fmt)
    with torch.no_grad():
        offsets = None if code.offsets is None else _codes(code.offsets)
        parts = Encoded(code.codes.view(code.scales.numel(), fmt.code_bytes), _codes(code.scales), offsets)
        return block_codec.decode(parts, fmt, code.shape.numel(), code.tensor_scale).to(dtype).view(code.shape)


def quantize_blocks(
    x: torch.Tensor, fmt: BlockFormat, rounding: str, generator: torch.Generator | None
) -> torch.Tensor:
    """Return ``x`` rounded to a block format, in the shape and dtype of ``x``; see `quantize`."""
    return decode_blocks(encode_blocks(x, fmt, rounding, generator), fmt, x.dtype)


def drawn_seed(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a cast's seed, (1,) int32, from torch's generator; equal states give equal rounding on every path."""
    return torch.empty(1, dtype=torch.int32, device=device).random_(generator=generator)


def _check(code: BlockCodes, fmt: BlockFormat) -> None:
    if not isinstance(code, BlockCodes):
        raise FormatError(
            f"codes of {fmt.name} are a fxprec.BlockCodes, not {type(code).__name__}; use encode's result"
        )
    blocks = -(-code.shape.numel() // fmt.block)
    wanted = {
        "codes": (torch.uint8, blocks * fmt.code_bytes),
        "scales": (fmt.scale_dtype, blocks),
        "offsets": (torch.bfloat16, blocks) if fmt.has_offset else None,
        "tensor_scale": (torch.float32, 1) if fmt.tensor_scale else None,
    }
    for name, form in wanted.items():
        part = getattr(code, name)
        found = None if part is None else (part.dtype, part.numel())
        if found != form:
            raise FormatError(
                f"{name} of {fmt.name}, {tuple(code.shape)}, are {form}, not {found}; use encode's result"
            )
