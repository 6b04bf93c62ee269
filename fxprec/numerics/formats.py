"""Number formats as data: sign, 1..8 exponent bits, 0..23 mantissa bits, an exponent bias, and a family.

A code (s, e, m) is (-1)^s * 2^(e - B) * (1 + m / 2^M) for e > 0 and (-1)^s * 2^(1 - B) * (m / 2^M) for e = 0,
with the offset B = 2^(E-1) - 1 + bias (docs/algorithms.md, "Number formats"). A new format is one more line in
``NAMED`` and nothing else: every limit below is derived from the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

import torch

from fxprec.errors import FormatError, did_you_mean

Specials: TypeAlias = Literal["none", "ieee", "fn"]
Overflow: TypeAlias = Literal["saturate", "inf", "nan"]

# What each family may do with a number beyond its largest number; the first entry is the default.
_OVERFLOWS: dict[str, tuple[Overflow, ...]] = {
    "none": ("saturate",),
    "ieee": ("inf", "saturate"),
    "fn": ("saturate", "nan"),
}
# Values are computed in float32 carriers.
_CARRIER_MIN_EXPONENT = -126
_CARRIER_MAX_EXPONENT = 127
_CARRIER_MANTISSA_BITS = 23


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    ``Format(E, M, bias)`` alone is the papers' kind: every code is a number, larger values saturate.
    Raises `FormatError` for bits that no format can have, and for a range beyond float32, which carries all values.
    """

    exponent_bits: int
    """1 to 8."""
    mantissa_bits: int
    """0 to 23; with 0 every number is a power of two, and ties go to the even code."""
    bias: int = 0
    """Added to the usual offset 2^(E-1) - 1: positive values shift the range down."""
    specials: Specials = "none"
    """``none``: all codes are numbers. ``ieee``: the top exponent code means inf and NaN. ``fn`` (OCP): only the
    all-ones code is NaN."""
    overflow: Overflow | None = None
    """The result for a value beyond the largest number, inf among them: ``saturate`` (the largest), ``inf`` or
    ``nan``. The default is ``saturate`` for ``none`` and ``fn``, ``inf`` for ``ieee``. NaN stays NaN wherever the
    format or its carrier has one."""

    def __post_init__(self) -> None:
        _check_bits("exponent_bits", self.exponent_bits, 1, 8)
        _check_bits("mantissa_bits", self.mantissa_bits, 0, _CARRIER_MANTISSA_BITS)
        if not isinstance(self.bias, int) or isinstance(self.bias, bool):
            raise FormatError(f"bias={self.bias!r} is not an integer; a format's bias is a whole number of binades")
        if not isinstance(self.specials, str) or self.specials not in _OVERFLOWS:
            raise FormatError(f"specials={self.specials!r} is unknown; use one of {sorted(_OVERFLOWS)}")
        allowed = _OVERFLOWS[self.specials]
        if self.overflow is None:
            object.__setattr__(self, "overflow", allowed[0])
        elif self.overflow not in allowed:
            raise FormatError(
                f"overflow={self.overflow!r} has no code in a format with specials={self.specials!r}; "
                f"use one of {list(allowed)}"
            )
        self._check_codes()
        self._check_range()

    def __reduce__(self) -> tuple[type[Format], tuple[object, ...]]:
        """Leave out what is cached, so that equal formats pickle alike: pickles are parts of cache keys."""
        return Format, (self.exponent_bits, self.mantissa_bits, self.bias, self.specials, self.overflow)

    def _check_codes(self) -> None:
        if self.specials == "ieee" and (self.exponent_bits < 2 or self.mantissa_bits < 1):
            raise FormatError(
                f"1-{self.exponent_bits}-{self.mantissa_bits} cannot be IEEE-like: inf and NaN need an exponent "
                "code and a mantissa bit of their own; use specials='none'"
            )
        if self.specials == "fn" and self.exponent_bits + self.mantissa_bits < 2:
            raise FormatError("1-1-0 has no code to spare for NaN; use specials='none'")

    def _check_range(self) -> None:
        top = self._top_exponent
        low, high = self.min_exponent, _CARRIER_MAX_EXPONENT + (self.specials == "none")
        if low < _CARRIER_MIN_EXPONENT or top > high or low - self.mantissa_bits > _CARRIER_MAX_EXPONENT - 23:
            raise FormatError(
                f"1-{self.exponent_bits}-{self.mantissa_bits} with bias {self.bias} spans 2^{low} to 2^{top}, beyond "
                "float32, in which every value is computed; choose a bias or specials='ieee' to keep it within 2^-126 "
                "to 2^127"
            )

    def has_numbers_of(self, other: Format) -> bool:
        """Return whether two formats have the same numbers; their overflow may differ."""
        return (self.exponent_bits, self.mantissa_bits, self.bias) == (
            other.exponent_bits,
            other.mantissa_bits,
            other.bias,
        )

    @property
    def _top_exponent(self) -> int:
        top_code = (1 << self.exponent_bits) - 1
        all_special = self.specials == "ieee" or (self.specials == "fn" and self.mantissa_bits == 0)
        return top_code - all_special - self.offset

    @property
    def bits(self) -> int:
        """Return the bits of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def offset(self) -> int:
        """Return B, the exponent offset: 2^(E-1) - 1 + bias."""
        return (1 << (self.exponent_bits - 1)) - 1 + self.bias

    @property
    def has_float32_range(self) -> bool:
        """Return whether it has as many exponent bits as float32, so that no number of a model leaves the range."""
        return self.exponent_bits >= 8

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the smallest normal number, 1 - B."""
        return 1 - self.offset

    @property
    def max_exponent(self) -> int:
        """Return the exponent of the largest number; at most 127, since float32 carries the values.

        Only formats without specials may have codes above that (``1-8-M``). No encoding makes them; they read as inf.
        """
        return min(self._top_exponent, _CARRIER_MAX_EXPONENT)

    @cached_property
    def largest_code(self) -> int:
        """Return the magnitude bits (the code without its sign) of the largest number."""
        mantissas = 1 << self.mantissa_bits
        last = (self.max_exponent + self.offset + 1) * mantissas - 1
        spared = self.specials == "fn" and self.mantissa_bits > 0 and self.max_exponent == self._top_exponent
        return last - spared

    @property
    def overflow_code(self) -> int:
        """Return the magnitude bits that a value beyond the largest number gets."""
        return self.largest_code + (self.overflow != "saturate")

    @property
    def nan_code(self) -> int | None:
        """Return the magnitude bits of a (quiet) NaN, None where every code is a number."""
        if self.specials == "none":
            return None
        top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        quiet = 1 << (self.mantissa_bits - 1) if self.specials == "ieee" else (1 << self.mantissa_bits) - 1
        return top + quiet

    @cached_property
    def largest(self) -> float:
        """Return the largest number."""
        mantissa = self.largest_code & ((1 << self.mantissa_bits) - 1)
        return 2.0**self.max_exponent * (1 + mantissa / (1 << self.mantissa_bits))

    @cached_property
    def smallest_normal(self) -> float:
        """Return the smallest normal number, 2^(1 - B)."""
        return 2.0**self.min_exponent

    @cached_property
    def smallest_subnormal(self) -> float:
        """Return the smallest positive number, 2^(1 - B - M); with 0 mantissa bits it is the smallest normal one."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def code_dtype(self) -> torch.dtype:
        """Return the smallest unsigned integer dtype that holds a code."""
        if self.bits <= 8:
            return torch.uint8
        return torch.uint16 if self.bits <= 16 else torch.uint32

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Return the native dtype whose codes mean the same numbers, for any overflow rule; None if there is none."""
        return _NATIVE.get((self.exponent_bits, self.mantissa_bits, self.bias, self.specials))

    @property
    def name(self) -> str:
        """Return the canonical name; ``parse(fmt.name) == fmt`` for every format."""
        known = _CANONICAL.get(self)
        if known is not None:
            return known
        bias = f"{self.bias:+d}" if self.bias else ""
        family = "" if self.specials == "none" else f":{self.specials}"
        rule = "" if self.overflow == _OVERFLOWS[self.specials][0] else f":{self.overflow}"
        return f"1-{self.exponent_bits}-{self.mantissa_bits}{bias}{family}{rule}"

    def contains(self, other: Format) -> bool:
        """Return whether every finite number of ``other`` is a number of this format."""
        return (
            self.mantissa_bits >= other.mantissa_bits
            and self.smallest_subnormal <= other.smallest_subnormal
            and self.min_exponent <= other.min_exponent
            and self.largest >= other.largest
        )

    def to_dict(self) -> dict[str, int | str]:
        """Return the fields as plain JSON values."""
        return {
            "exponent_bits": self.exponent_bits,
            "mantissa_bits": self.mantissa_bits,
            "bias": self.bias,
            "specials": self.specials,
            "overflow": str(self.overflow),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Format:
        """Build a format from `to_dict`'s result. Raises `FormatError` for an unknown or missing field."""
        known = cls.__dataclass_fields__
        for field in fields:
            if field not in known:
                raise FormatError(f"a format has no field {field!r}{did_you_mean(field, known)}; use {list(known)}")
        for field in ("exponent_bits", "mantissa_bits"):
            if field not in fields:
                raise FormatError(f"a format needs {field!r}, which is missing; add it")
        return cls(**fields)

    def __str__(self) -> str:
        return self.name


def _check_bits(field: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{field}={value!r} is not an integer; use {least} to {most}")
    if not least <= value <= most:
        raise FormatError(f"{field}={value} is out of range for a float of at most 32 bits; use {least} to {most}")


FP32 = Format(8, 23, specials="ieee")
"""IEEE single; rounding to it is the identity."""
FP16 = Format(5, 10, specials="ieee")
"""IEEE half: beyond 65504 is inf, as the hardware does."""
FP16_SAT = Format(5, 10, specials="ieee", overflow="saturate")
"""IEEE half, where inf and larger values become 65504: for gradients that carry a scale of their own."""
BF16 = Format(8, 7, specials="ieee")
"""bfloat16: beyond 3.39e38 is inf, as the hardware does."""
E5M2 = Format(5, 2, specials="ieee")
"""OCP FP8 E5M2, overflow to inf (OCP's non-saturating mode, as ``tensor.to(torch.float8_e5m2)``)."""
E5M2_SAT = Format(5, 2, specials="ieee", overflow="saturate")
"""OCP FP8 E5M2 in saturating mode (``cvt.rn.satfinite``), for training: inf and larger become 57344, NaN stays."""
E4M3FN = Format(4, 3, specials="fn")
"""OCP FP8 E4M3 in saturating mode (``cvt.rn.satfinite``; clamp, then cast): inf and larger become 448."""
E4M3FN_NAN = Format(4, 3, specials="fn", overflow="nan")
"""OCP FP8 E4M3 in non-saturating mode: beyond 448 is NaN, as ``tensor.to(torch.float8_e4m3fn)``."""
HFP8_143 = Format(4, 3, bias=4)
"""HFP8 forward (Sun et al. 2019): 2^-13 to 30."""
HFP8_152 = Format(5, 2)
"""HFP8 backward, also APS's 1-5-2: 2^-16 to 114688."""
FP16_169 = Format(6, 9)
"""The high format of Sun et al. 2019 and Lee et al. 2023."""
APS_130 = Format(3, 0)
"""APS's 4 bits: powers of two."""
APS_121 = Format(2, 1)
"""APS's 4 bits with a mantissa bit."""

NAMED: dict[str, Format] = {
    "fp32": FP32,
    "fp16": FP16,
    "fp16_sat": FP16_SAT,
    "bf16": BF16,
    "e5m2": E5M2,
    "e5m2_sat": E5M2_SAT,
    "e4m3fn": E4M3FN,
    "e4m3fn_nan": E4M3FN_NAN,
}
"""Formats with a name of their own; all others are written ``1-E-M[+bias][:specials][:overflow]``."""

_ALIASES = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e5m2": "e5m2",
    "float8_e4m3fn": "e4m3fn",
}
_CANONICAL = {fmt: name for name, fmt in NAMED.items()}
_NATIVE: dict[tuple[int, int, int, str], torch.dtype] = {
    (8, 23, 0, "ieee"): torch.float32,
    (5, 10, 0, "ieee"): torch.float16,
    (8, 7, 0, "ieee"): torch.bfloat16,
    (5, 2, 0, "ieee"): torch.float8_e5m2,
    (4, 3, 0, "fn"): torch.float8_e4m3fn,
}
_SYNTAX = re.compile(
    r"1-(?P<e>\d{1,2})-(?P<m>\d{1,2})(?P<bias>[+-]\d{1,3})?(:(?P<specials>ieee|fn))?(:(?P<overflow>saturate|inf|nan))?"
)


def kept_codes(fmt: Format) -> tuple[int, int, int]:
    """Return the codes that keep inf and NaN visible, also if the format saturates, and the sign bit.

    Infinity has the format's own code, or else NaN's. The format must have NaN.
    """
    assert fmt.nan_code is not None, f"{fmt.name} has no code for inf or NaN"
    inf = fmt.largest_code + 1 if fmt.specials == "ieee" else fmt.nan_code
    return inf, fmt.nan_code, 1 << (fmt.bits - 1)


def parse(fmt: str | Format) -> Format:
    """Return the format of a name: ``"e4m3fn"``, ``"bf16"``, ``"1-4-3+4"``, ``"1-8-5:ieee"``; a `Format` as it is.

    Raises `FormatError`, with the nearest valid name, for anything else.
    """
    if isinstance(fmt, Format):
        return fmt
    if not isinstance(fmt, str):
        raise FormatError(f"{fmt!r} is not a format; give a fxprec.Format or a name such as 'e4m3fn' or '1-4-3+4'")
    return _parsed(fmt)


@lru_cache(maxsize=1024)  # each cast of a CPU's step calls it: 24 us without the cache
def _parsed(fmt: str) -> Format:
    word = fmt.strip().lower()
    known = NAMED.get(_ALIASES.get(word, word))
    if known is not None:
        return known
    match = _SYNTAX.fullmatch(word)
    if match is None:
        raise FormatError(
            f"unknown format {fmt!r}{did_you_mean(word, [*NAMED, *_ALIASES])}; "
            f"use one of {list(NAMED)} or 1-E-M[+bias][:ieee|:fn]"
        )
    return Format(
        int(match["e"]),
        int(match["m"]),
        int(match["bias"] or 0),
        match["specials"] or "none",  # type: ignore[arg-type]
        match["overflow"],  # type: ignore[arg-type]
    )
