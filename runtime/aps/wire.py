"""Codes of a number format or of an 8-bit codec as the bytes that are sent.

A wire turns scaled float32 values into bytes and back. Formats wider than a byte use 16-bit codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from fxprec.errors import FormatError
from fxprec.numerics import rounding
from fxprec.numerics.formats import Format, parse
from fxprec.runtime.aps.codec_tables import TABLES
from fxprec.runtime.aps.codecs import Codec, codec, decode_values, encode_values

_BLOCK = 1 << 15  # elements: 128 KiB of float32
MAX_TOP_EXPONENT = 100  # leaves float32 room for a sum over 2^27 ranks


class Wire(Protocol):
    """Encoder and decoder of one kind of code."""

    @property
    def name(self) -> str:
        """Name of the format or codec."""

    @property
    def code_bytes(self) -> int:
        """Return the bytes of one code, 1 or 2."""

    @property
    def kind(self) -> Format | Codec:
        """Return the format or codec of the codes."""

    @property
    def top(self) -> int:
        """Return the exponent of the power of two that a layer's largest magnitude is scaled to, at most."""

    def encode(self, values: Tensor, *, generator: torch.Generator | None = None, bounded: bool = False) -> Tensor:
        """Return the bytes (uint8, n * code_bytes) of float32 values (n,).

        with a `generator`, rounding is stochastic; `bounded` promises magnitudes of at most 2^top.
        """

    def decode(self, codes: Tensor, *, bounded: bool = False) -> Tensor:
        """Return float32 values (n,) of bytes (n * code_bytes,); `bounded` codes come from a `bounded` encoding."""


# Casts torch has: the dtype and the largest exponent up to which its codes are those of any 1-E-M of equal widths.
_NATIVE: dict[tuple[int, int], tuple[torch.dtype, int]] = {
    (5, 2): (torch.float8_e5m2, 15),
    (4, 3): (torch.float8_e4m3fn, 8),
    (5, 10): (torch.float16, 15),
    (8, 7): (torch.bfloat16, 127),
}


@dataclass(frozen=True)
class FloatWire:
    """Codes of a number format of at most 16 bits."""

    fmt: Format

    def __post_init__(self) -> None:
        if self.fmt.bits > 16:
            raise FormatError(
                f"format {self.fmt.name} has {self.fmt.bits} bits; gradients are sent in codes of at most 16: choose "
                "a narrower format, or leave the hook out"
            )

    @property
    def kind(self) -> Format:
        """Return the format."""
        return self.fmt

    @property
    def name(self) -> str:
        """Name of the format."""
        return self.fmt.name

    @property
    def code_bytes(self) -> int:
        """Return 1 up to 8 bits, else 2."""
        return 1 if self.fmt.bits <= 8 else 2

    @cached_property
    def top(self) -> int:
        """Return the paper's e_max for IEEE-like formats; no more than torch's own cast of these widths holds."""
        native = _NATIVE.get((self.fmt.exponent_bits, self.fmt.mantissa_bits))
        limit = MAX_TOP_EXPONENT if native is None else min(MAX_TOP_EXPONENT, native[1] - self.fmt.bias)
        return min(self.fmt.max_exponent, limit)

    @cached_property
    def _cast(self) -> torch.dtype | None:
        """Return torch's dtype whose codes agree for magnitudes of at most 2^top."""
        native = _NATIVE.get((self.fmt.exponent_bits, self.fmt.mantissa_bits))
        return None if native is None or abs(self.fmt.bias) > MAX_TOP_EXPONENT else native[0]

    def encode(self, values: Tensor, *, generator: torch.Generator | None = None, bounded: bool = False) -> Tensor:
        """See `Wire.encode`."""
        if generator is None and bounded and self._cast is not None:
            shifted = values if self.fmt.bias == 0 else values * 2.0**self.fmt.bias
            return shifted.to(self._cast).view(torch.uint8)
        return _in_blocks(partial(_encode, fmt=self.fmt, generator=generator), values).view(torch.uint8)

    def decode(self, codes: Tensor, *, bounded: bool = False) -> Tensor:
        """See `Wire.decode`."""
        if self.fmt.torch_dtype is not None:
            return codes.view(self.fmt.torch_dtype).to(torch.float32)
        if bounded and self._cast is not None:
            values = codes.view(self._cast).to(torch.float32)
            return values if self.fmt.bias == 0 else values.mul_(2.0**-self.fmt.bias)
        return _in_blocks(partial(rounding.decode, fmt=self.fmt), codes.view(self.fmt.code_dtype))


@dataclass(frozen=True)
class TableWire:
    """Codes of an 8-bit codec; the largest magnitude is brought to at most the codec's largest, 1 or below."""

    codec: Codec

    @property
    def kind(self) -> Codec:
        """Return the codec."""
        return self.codec

    @property
    def name(self) -> str:
        """Name of the codec."""
        return self.codec.name

    @property
    def code_bytes(self) -> int:
        """Return 1."""
        return 1

    @property
    def top(self) -> int:
        """Return 0: values of at most 1. What little of (0.966, 1] a static tree lacks saturates, by under 4 %."""
        return 0

    def encode(self, values: Tensor, *, generator: torch.Generator | None = None, bounded: bool = False) -> Tensor:
        """See `Wire.encode`."""
        if generator is not None:
            uniform = torch.rand(values.shape, generator=generator, dtype=torch.float32, device=values.device)
            return encode_values(values, self.codec, uniform)
        if values.is_cuda:
            from fxprec.runtime.aps import codec_triton

            return codec_triton.encode_values(values, self.codec)
        return encode_values(values, self.codec)

    def decode(self, codes: Tensor, *, bounded: bool = False) -> Tensor:
        """See `Wire.decode`."""
        return decode_values(codes, self.codec)


def _encode(values: Tensor, fmt: Format, generator: torch.Generator | None) -> Tensor:
    return rounding.encode(values, fmt, "nearest" if generator is None else "stochastic", generator)


def _in_blocks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run an element-wise function: fused above the size where that pays, else in blocks that stay in the cache."""
    if x.numel() <= _BLOCK or x.numel() > rounding.COMPILE_ABOVE or x.is_cuda:
        return function(x)
    return torch.cat([function(block) for block in torch.split(x, _BLOCK)])


def wire_of(fmt: str | Format | Codec) -> Wire:
    """Return the wire of a format, a codec, or the name of either. Raises `FormatError` for anything else."""
    if isinstance(fmt, Codec):
        return TableWire(fmt)
    if isinstance(fmt, str) and fmt in TABLES:
        return TableWire(codec(fmt))
    return FloatWire(parse(fmt))
