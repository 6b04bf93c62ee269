"""Turn values into the bytes that are sent: codes of a number format, of an 8-bit codec or of a block format.

A wire turns float32 values into bytes and back. Formats wider than a byte use 16-bit codes. Values for a number format
or a codec are scaled before; a block format scales by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fxprec.errors import FormatError
from fxprec.numerics import block_codec, rounding
from fxprec.numerics.block_rounding import drawn_seed
from fxprec.numerics.blocks import AnyFormat, BlockFormat, find
from fxprec.numerics.formats import BF16, Format
from fxprec.runtime.aps import kernels
from fxprec.runtime.aps.codec_tables import TABLES
from fxprec.runtime.aps.codecs import Codec, codec, decode_values, encode_values
from fxprec.runtime.cpu import blocks as cpu_blocks

_BLOCK = 1 << 15  # elements: 128 KiB of float32
MAX_TOP_EXPONENT = 100  # leaves float32 room for a sum over 2^27 ranks


@dataclass(frozen=True)
class Wire(ABC):
    """An encoder and decoder of one kind of code."""

    kind: Format | Codec | BlockFormat

    @property
    def name(self) -> str:
        """Return the name of the format or codec."""
        return self.kind.name

    @property
    def block(self) -> int:
        """Return how many elements are coded together: 1, or those that share a scale."""
        return 1

    @property
    def code_bytes(self) -> int:
        """Return the bytes of one block's codes; 1 or 2 if a block is one element."""
        return 1

    @property
    def top(self) -> int:
        """Return the exponent of the power of two up to which a layer's largest magnitude is scaled.

        A wire of blocks larger than 1 takes layers unscaled.
        """
        return 0

    @abstractmethod
    def encode(self, values: Tensor, *, generator: torch.Generator | None = None, bounded: bool = False) -> Tensor:
        """Return the bytes (uint8, n * code_bytes) of float32 values (n,).

        With a `generator`, rounding is stochastic; `bounded` promises magnitudes of at most 2^top.
        """

    @abstractmethod
    def decode(self, codes: Tensor, *, bounded: bool = False) -> Tensor:
        """Return float32 values (n,) of bytes (n * code_bytes,); `bounded` codes come from a `bounded` encoding."""


# Casts that torch has: the dtype, and the largest exponent up to which its codes equal those of any 1-E-M format with
# these widths.
_NATIVE: dict[tuple[int, int], tuple[torch.dtype, int]] = {
    (5, 2): (torch.float8_e5m2, 15),
    (4, 3): (torch.float8_e4m3fn, 8),
    (5, 10): (torch.float16, 15),
    (8, 7): (torch.bfloat16, 127),
}


@dataclass(frozen=True)
class FloatWire(Wire):
    """Codes of a number format of at most 16 bits."""

    kind: Format

    def __post_init__(self) -> None:
        if self.kind.bits > 16:
            raise FormatError(
                f"format {self.kind.name} has {self.kind.bits} bits; gradients are sent in codes of at most 16: choose "
                "a narrower format, or leave the hook out"
            )

    @property
    def code_bytes(self) -> int:
        return 1 if self.kind.bits <= 8 else 2

    @cached_property
    def top(self) -> int:
        """Return the paper's e_max for IEEE-like formats, at most what torch's own cast of these widths represents."""
        native = _NATIVE.get((self.kind.exponent_bits, self.kind.mantissa_bits))
        limit = MAX_TOP_EXPONENT if native is None else min(MAX_TOP_EXPONENT, native[1] - self.kind.bias)
        return min(self.kind.max_exponent, limit)

    @cached_property
    def _cast(self) -> torch.dtype | None:
        """Return torch's dtype whose codes agree for magnitudes of at most 2^top, or None."""
        native = _NATIVE.get((self.kind.exponent_bits, self.kind.mantissa_bits))
        return None if native is None or abs(self.kind.bias) > MAX_TOP_EXPONENT else native[0]

    def encode(self, values: Tensor, *, generator: torch.Generator | None = None, bounded: bool = False) -> Tensor:
        if generator is None and (bounded or self.kind == BF16) and self._cast is not None:
            shifted = values if self.kind.bias == 0 else values * 2.0**self.kind.bias
            return shifted.to(self._cast).view(torch.uint8)
        return _in_blocks(partial(_encode, fmt=self.kind, generator=generator), values).view(torch.uint8)

    def decode(self, codes: Tensor, *, bounded: bool = False) -> Tensor:
        if self.kind.torch_dtype is not None:
            return codes.view(self.kind.torch_dtype).to(torch.float32)
        if bounded and self._cast is not None:
            values = codes.view(self._cast).to(torch.float32)
            return values if self.kind.bias == 0 else values.mul_(2.0**-self.kind.bias)
        return _in_blocks(partial(rounding.decode, fmt=self.kind), codes.view(self.kind.code_dtype))


@dataclass(frozen=True)
class TableWire(Wire):
    """Codes of an 8-bit codec, for values that are scaled to at most 1.

    A static tree ends at 0.966, so values above saturate, by under 4 %.
    """

    kind: Codec

    def encode(self, values: Tensor, *, generator: torch.Generator | None = None, bounded: bool = False) -> Tensor:
        if generator is not None:
            uniform = torch.rand(values.shape, generator=generator, dtype=torch.float32, device=values.device)
            return encode_values(values, self.kind, uniform)
        if values.is_cuda:
            from fxprec.runtime.aps import codec_triton

            return codec_triton.encode_values(values, self.kind)
        return encode_values(values, self.kind)

    def decode(self, codes: Tensor, *, bounded: bool = False) -> Tensor:
        return decode_values(codes, self.kind)


@dataclass(frozen=True)
class BlockWire(Wire):
    """Records of a block format: each block's scale, then its codes."""

    kind: BlockFormat

    def __post_init__(self) -> None:
        if self.kind.tensor_scale:
            raise FormatError(
                f"{self.kind.name} has one scale for the whole tensor, which the parts of a bucket cannot share; use a "
                "block format without one, such as '1-2-1/256:e8m0'"
            )

    @property
    def block(self) -> int:
        return self.kind.block

    @property
    def code_bytes(self) -> int:
        return self.kind.head_bytes + self.kind.code_bytes

    def encode(self, values: Tensor, *, generator: torch.Generator | None = None, bounded: bool = False) -> Tensor:
        seed = None if generator is None else drawn_seed(values.device, generator)
        store = cpu_blocks.store_blocks if kernels.usable(values) else block_codec.stored
        return store(values, seed, None, 0, self.kind.name).view(-1)

    def decode(self, codes: Tensor, *, bounded: bool = False) -> Tensor:
        count = codes.numel() // self.code_bytes * self.block
        load = cpu_blocks.load_blocks if kernels.usable(codes) else block_codec.loaded
        return load(codes.view(-1, self.code_bytes), None, 0, self.kind.name, count, torch.float32)


def num_bytes(wire: Wire, elements: int) -> int:
    """Return the bytes of `elements`, a multiple of the block."""
    return elements // wire.block * wire.code_bytes


def _encode(values: Tensor, fmt: Format, generator: torch.Generator | None) -> Tensor:
    return rounding.encode(values, fmt, "nearest" if generator is None else "stochastic", generator)


def _in_blocks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run an element-wise function at once if x is small, large enough to be fused, or on a GPU; else in blocks.

    Blocks stay in the cache.
    """
    if x.numel() <= _BLOCK or x.numel() > rounding.COMPILE_ABOVE or x.is_cuda:
        return function(x)
    return torch.cat([function(block) for block in torch.split(x, _BLOCK)])


Coding: TypeAlias = Wire | torch.dtype | None
"""How gradients are sent: in a wire's codes, or uncoded in a dtype; None is the gradient's own dtype."""


INSIDE = torch.bfloat16
"""Dtype in which gradients that are coded between nodes, and later their means, are sent inside of a node."""


class Sending(NamedTuple):
    """How a layer is sent."""

    coding: Coding
    by_nodes: bool = False
    low_rank: int = 0
    """Columns of P and Q, as which the layer is sent (`runtime/aps/low_rank.py`); 0 sends its elements."""

    @property
    def wire(self) -> Wire | None:
        """Return the wire of the codes, or None if the layer is sent uncoded."""
        return None if self.coding is None or isinstance(self.coding, torch.dtype) else self.coding

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype in which the layer is sent uncoded; None for codes and for the gradient's own dtype."""
        return self.coding if isinstance(self.coding, torch.dtype) else None

    def inside(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of dtype `own` are sent inside of nodes."""
        return INSIDE if self.wire is not None else self.dtype or own


def wire_of(fmt: str | AnyFormat | Codec) -> Wire:
    """Return the wire of a format, a codec, or the name of either. Raises `FormatError` for anything else."""
    if isinstance(fmt, Codec):
        return TableWire(fmt)
    if isinstance(fmt, str) and fmt in TABLES:
        return TableWire(codec(fmt))
    found = find(fmt)
    return BlockWire(found) if isinstance(found, BlockFormat) else FloatWire(found)
