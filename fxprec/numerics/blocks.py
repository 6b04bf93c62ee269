"""Block formats as data: elements of few bits, and a scale that the elements of a block share.

The scale adapts to each block, so no tensor over- or underflows as a whole; a `Format` needs an external scale for
that. A new block format is one more line in ``NAMED``. Definitions: docs/algorithms.md, "Block formats".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from fxprec.errors import FormatError, did_you_mean
from fxprec.numerics import formats
from fxprec.numerics.formats import E4M3FN, E5M2_SAT, Format

ScaleName: TypeAlias = Literal["e8m0", "e8m0up", "e4m3fn", "bf16"]
_SCALE_DTYPES: dict[str, torch.dtype] = {
    "e8m0": torch.float8_e8m0fnu,
    "e8m0up": torch.float8_e8m0fnu,
    "e4m3fn": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
}
_LARGEST_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Integer:
    """Integers 0 to 2^bits - 1, which a block's scale and offset place. Raises `FormatError` for other bits."""

    bits: int
    """1, 2, 4 or 8."""

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (1, 2, 4, 8):
            raise FormatError(f"bits={self.bits!r} is not a size of an integer in a block; use 1, 2, 4 or 8")

    @property
    def largest(self) -> int:
        """Return the largest integer."""
        return (1 << self.bits) - 1

    @property
    def name(self) -> str:
        """Return the canonical name: ``int4``."""
        return f"int{self.bits}"


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Elements in blocks of one size, in the order of a contiguous tensor; the elements of a block share a scale.

    An element is ``number * scale``, or ``code * scale + offset`` for integers. A block that holds inf or NaN reads as
    NaN. Raises `FormatError` for elements, sizes or scales that no block can have.
    """

    element: Format | Integer
    block: int
    """Elements that share a scale: a power of two from 8 to 4096."""
    scale: ScaleName
    """Format of the scale: ``e8m0`` (a power of two, rounded as OCP does), ``e8m0up`` (the same, rounded up),
    ``e4m3fn`` or ``bf16``. Integers need bf16, and have a bf16 offset."""
    tensor_scale: bool = False
    """Whether a float32 for the whole tensor multiplies the scales, so that they use all of e4m3fn's range."""

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or not 8 <= self.block <= _LARGEST_BLOCK or self.block & (self.block - 1):
            raise FormatError(
                f"block={self.block!r} is not a size of a block; use a power of two from 8 to {_LARGEST_BLOCK}"
            )
        if not isinstance(self.scale, str) or self.scale not in _SCALE_DTYPES:
            raise FormatError(f"scale={self.scale!r} is unknown; use one of {list(_SCALE_DTYPES)}")
        if self.tensor_scale and self.scale != "e4m3fn":
            raise FormatError(f"a tensor scale with {self.scale} scales would change nothing; use it with e4m3fn")
        if isinstance(self.element, Integer):
            if self.scale != "bf16":
                raise FormatError(f"integers have a bf16 scale and offset, not {self.scale}; use scale='bf16'")
        elif not isinstance(self.element, Format) or self.element.bits not in (4, 6, 8):
            raise FormatError("a block's elements are an Integer or a Format of 4, 6 or 8 bits; use one of these")
        elif self.element.overflow != "saturate":
            raise FormatError(
                f"{self.element.name} does not saturate, as a block's elements must; use overflow='saturate'"
            )

    @property
    def bits(self) -> int:
        """Return the bits of an element's code."""
        return self.element.bits

    @property
    def has_offset(self) -> bool:
        """Return whether blocks have an offset beside their scale."""
        return isinstance(self.element, Integer)

    @property
    def has_power_scale(self) -> bool:
        """Return whether scales are powers of two."""
        return self.scale_dtype == torch.float8_e8m0fnu

    @property
    def scale_dtype(self) -> torch.dtype:
        """Return the dtype in which scales are stored."""
        return _SCALE_DTYPES[self.scale]

    @property
    def code_bytes(self) -> int:
        """Return the bytes of a block's codes."""
        return self.block * self.bits // 8

    @property
    def head_bytes(self) -> int:
        """Return the bytes of a block's scale and offset."""
        return self.scale_dtype.itemsize * (1 + self.has_offset)

    @property
    def bits_per_element(self) -> float:
        """Return the bits that an element takes, with its share of scale and offset."""
        return self.bits + 8 * self.head_bytes / self.block

    def num_bytes(self, elements: int) -> int:
        """Return the bytes of that many elements, scales included."""
        blocks = -(-elements // self.block)
        return blocks * (self.head_bytes + self.code_bytes) + 4 * self.tensor_scale

    @property
    def name(self) -> str:
        """Return the canonical name; ``find(fmt.name) == fmt`` for every format."""
        known = _CANONICAL.get(self)
        return known if known is not None else f"{self.element.name}/{self.block}:{self.scale}{'*' * self.tensor_scale}"

    def __str__(self) -> str:
        return self.name


E2M1 = Format(2, 1)
"""OCP FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
E2M3 = Format(2, 3)
"""OCP FP6 with 3 mantissa bits: up to 7.5."""
E3M2 = Format(3, 2)
"""OCP FP6 with 3 exponent bits: up to 28."""

MXFP8_E4M3 = BlockFormat(E4M3FN, 32, "e8m0")
MXFP8_E5M2 = BlockFormat(E5M2_SAT, 32, "e8m0")
MXFP6_E2M3 = BlockFormat(E2M3, 32, "e8m0")
MXFP6_E3M2 = BlockFormat(E3M2, 32, "e8m0")
MXFP4 = BlockFormat(E2M1, 32, "e8m0")
"""OCP MX: 32 elements share a power of two."""
NVFP4 = BlockFormat(E2M1, 16, "e4m3fn", tensor_scale=True)
"""NVIDIA's: 16 elements share an e4m3fn scale, all elements a float32 scale."""
INT8 = BlockFormat(Integer(8), 256, "bf16")
INT4 = BlockFormat(Integer(4), 256, "bf16")
INT2 = BlockFormat(Integer(2), 256, "bf16")
"""As ActNN and GACT store activations: 256 elements share scale and offset, 1/8 bit an element."""

NAMED: dict[str, BlockFormat] = {
    "mxfp8_e4m3": MXFP8_E4M3,
    "mxfp8_e5m2": MXFP8_E5M2,
    "mxfp6_e2m3": MXFP6_E2M3,
    "mxfp6_e3m2": MXFP6_E3M2,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "int8": INT8,
    "int4": INT4,
    "int2": INT2,
}
"""Block formats with a name of their own; all others are written ``element/block:scale``, as ``int4/64:bf16``."""

_ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e2m3"}
_CANONICAL = {fmt: name for name, fmt in NAMED.items()}
WHOLE_BITS = 8
"""Bits from which a block format is accurate enough wherever backward reads 8 bits, and is rounded to nearest."""
_SYNTAX = re.compile(r"(int(?P<bits>\d)|(?P<element>[^/]+))/(?P<block>\d{1,5}):(?P<scale>\w+)(?P<tensor>\*?)")

AnyFormat: TypeAlias = Format | BlockFormat


def find(fmt: str | AnyFormat) -> AnyFormat:
    """Return the format of a name, a block format (``"mxfp4"``, ``"int4/64:bf16"``) or another (`formats.parse`).

    Raises `FormatError`, with the nearest valid name, for anything else.
    """
    if not isinstance(fmt, str):
        return fmt if isinstance(fmt, BlockFormat) else formats.parse(fmt)
    word = fmt.strip().lower()
    known = NAMED.get(_ALIASES.get(word, word))
    if known is not None:
        return known
    match = _SYNTAX.fullmatch(word)
    if match is not None:
        element = Integer(int(match["bits"])) if match["bits"] else _saturating(formats.parse(match["element"]))
        return BlockFormat(element, int(match["block"]), match["scale"], bool(match["tensor"]))  # type: ignore[arg-type]
    try:
        return formats.parse(fmt)
    except FormatError:
        hint = did_you_mean(word, [*NAMED, *_ALIASES])
        if not hint:
            raise
        raise FormatError(
            f"unknown format {fmt!r}{hint}; block formats are {list(NAMED)} or element/block:scale"
        ) from None


def find_blocks(name: str) -> BlockFormat:
    """Return the block format of a name. Raises `FormatError` for the name of another format."""
    fmt = find(name)
    if not isinstance(fmt, BlockFormat):
        raise FormatError(f"{name!r} has no blocks; give a block format, such as 'mxfp4', 'int4' or 'int4/64:bf16'")
    return fmt


def _saturating(fmt: Format) -> Format:
    return replace(fmt, overflow="saturate")
