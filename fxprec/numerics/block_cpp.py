"""Print the C++ of block formats from `block_codec`, for the kernel in runtime/cpu/blocks.cpp.

The text replaces ``/*BLOCKS*/`` in a kernel's file. The kernel takes the format as ``struct Blocks``, so one
compilation serves every block format.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from fxprec.numerics import block_codec, codec, directed, special
from fxprec.numerics.block_codec import BlockRow, block_row, scale_format
from fxprec.numerics.blocks import BlockFormat, Integer
from fxprec.numerics.cpp import CFormat, c_format, function, source
from fxprec.numerics.formats import BF16
from fxprec.numerics.kept_text import kept
from fxprec.numerics.rows import format_row
from fxprec.numerics.trace import Kind

MARK = "/*BLOCKS*/"


_NUMBERS = (*BlockRow._fields, "block", "bits", "scale_bytes", "is_integer", "is_power")
_FORMATS = ("element", "scale")


class CBlocks(ctypes.Structure):
    """``struct Blocks`` of the C++ kernel."""

    _fields_ = (*((name, CFormat) for name in _FORMATS), *((name, ctypes.c_int32) for name in _NUMBERS))


@lru_cache(maxsize=256)
def c_blocks(fmt: BlockFormat, *, stochastic: bool) -> CBlocks:
    """Return the struct of a block format. Callers share it."""
    is_power = fmt.has_power_scale
    return CBlocks(
        c_format(BF16 if isinstance(fmt.element, Integer) else fmt.element),
        c_format(BF16 if is_power else scale_format(fmt)),
        *block_row(fmt, stochastic=stochastic),
        fmt.block,
        fmt.bits,
        fmt.scale_dtype.itemsize,
        fmt.has_offset,
        is_power,
    )


@cache
def with_blocks(text: str) -> str:
    """Return a kernel's source with the codec and the text of blocks inserted."""
    assert MARK in text
    blocks = kept("blocks", _printed)
    return text.replace(MARK, f"{source()}\nnamespace {{\n{blocks}}}  // namespace\n")


def _printed() -> str:
    return _struct() + _functions()


def _struct() -> str:
    fields = [f"  Format {name};\n" for name in _FORMATS] + [f"  int32_t {name};\n" for name in _NUMBERS]
    return f"struct Blocks {{\n{''.join(fields)}}};\nstruct Pair {{ float first; float second; }};\n"


def _functions() -> str:
    ends: dict[str, Kind] = {"inverse": "float", "offset": "float", "greatest": "int_scalar"}
    coded: dict[str, Kind] = {"amax": "int", "whole": "float", "greatest": "int_scalar"}
    printed = (
        function(
            "random_bits", {"index": "int", "seed": "int_scalar"}, lambda i, s, *_: block_codec.random_bits(i, s), _INT
        ),
        function("ordered", {"bits": "int"}, lambda bits, *_: block_codec.ordered(bits), _INT),
        function(
            "power_scale",
            {"amax": "int", "largest_exponent": "int_scalar", "carry": "int_scalar"},
            lambda amax, exponent, carry, *_: block_codec.power_scale(amax, BlockRow(exponent, carry, 0)),
            _INT,
        ),
        function("power_inverse", {"scale": "int"}, lambda scale, *_: block_codec.power_inverse(scale)),
        function("power_factors", {"scale": "int"}, lambda scale, *_: block_codec.power_factors(scale), "Pair"),
        *(
            function(
                name,
                coded,
                lambda amax, whole, greatest, *rows, up=up: block_codec.coded_scale(
                    amax, whole, BlockRow(0, 0, greatest), *rows, stochastic=up
                ),
                _INT,
            )
            for name, up in (("nearest_scale", False), ("raised_scale", True))
        ),
        function(
            "inverse_or_zero",
            {"scale": "float", "whole": "float"},
            lambda scale, whole, *_: block_codec.inverse_or_zero(scale, whole),
        ),
        function(
            "range_scale",
            {"low": "int", "high": "int", "greatest": "int_scalar"},
            lambda low, high, greatest, *_: block_codec.range_scale(low, high, BlockRow(0, 0, greatest)),
            "Pair",
        ),
        function(
            "integer",
            {"x": "float", **ends},
            lambda x, inverse, offset, greatest, *_: block_codec.integer(x, inverse, offset, BlockRow(0, 0, greatest)),
            _INT,
        ),
        function(
            "dithered_integer",
            {"x": "float", "random": "int", **ends},
            lambda x, random, inverse, offset, greatest, *_: block_codec.dithered_integer(
                x, random, inverse, offset, BlockRow(0, 0, greatest)
            ),
            _INT,
        ),
        function(
            "integer_number",
            {"code": "int", "scale": "float", "offset": "float"},
            lambda code, scale, offset, *_: block_codec.integer_number(code, scale, offset),
        ),
        function(
            "dithered_codes",
            {"x": "float", "random": "int"},
            lambda x, random, row, code: codec.codes(directed.dithered(x, random, row), row, code),
            _INT,
        ),
        function("as_bfloat16", {"x": "float"}, lambda x, *_: special.nearest_cut(x, format_row(BF16))),
    )
    return "\n".join(printed)


_INT = "int32_t"
