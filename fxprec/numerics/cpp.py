"""Print the codec in C++, for every kernel that rounds, packs or unpacks.

The text replaces ``/*CODEC*/`` in a kernel's file. The kernel takes the format as ``struct Format``, whose fields are
those of `FormatRow` and `CodeRow`, so one compilation serves every format.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache, lru_cache

from torch import Tensor

from fxprec.numerics import codec
from fxprec.numerics.dialects import CPP
from fxprec.numerics.formats import Format
from fxprec.numerics.kept_text import kept
from fxprec.numerics.printer import Name, statements
from fxprec.numerics.rows import CodeRow, FormatRow, Thresholds, code_row, format_row, thresholds
from fxprec.numerics.trace import Kind, trace

MARK = "/*CODEC*/"
_FORMAT = FormatRow._fields[1:]
_FIELDS = (*_FORMAT, *CodeRow._fields)
_LIMITS = tuple(f"{name}_threshold" for name in Thresholds._fields)


class CFormat(ctypes.Structure):
    """``struct Format`` of the C++ kernels."""

    _fields_ = tuple((name, ctypes.c_int32) for name in (*_FIELDS, *_LIMITS))


@lru_cache(maxsize=4096)
def c_format(fmt: Format) -> CFormat:
    """Return the struct of a format. Callers share it: copy it before changing a field."""
    row = format_row(fmt)
    return CFormat(*row[1:], *code_row(fmt), *thresholds(row))


def c_format_of(row: FormatRow[int]) -> CFormat:
    """Return the struct of a row of the scale table, for rounding only: its code fields are 0."""
    return CFormat(*row[1:], *(0 for _ in CodeRow._fields), *thresholds(row))


PRELUDE = """#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
// Inductor switches the first off: its own loops are written in vectors.
#pragma GCC optimize("tree-loop-vectorize", "no-trapping-math", "signed-zeros")
#define FXPREC_INLINE inline __attribute__((always_inline))
#define FXPREC_NOINLINE __attribute__((noinline))  // OpenMP's own functions do not take over the options above
#else
#define FXPREC_INLINE inline
#define FXPREC_NOINLINE
#endif

namespace {
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;

FXPREC_INLINE int32_t bits_of(float x) { int32_t b; std::memcpy(&b, &x, 4); return b; }
FXPREC_INLINE float float_of(int32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
// Integers wrap, as torch's do.
FXPREC_INLINE int32_t add(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
FXPREC_INLINE int32_t sub(int32_t a, int32_t b) { return int32_t(uint32_t(a) - uint32_t(b)); }
FXPREC_INLINE int32_t mul(int32_t a, int32_t b) { return int32_t(uint32_t(a) * uint32_t(b)); }
FXPREC_INLINE int32_t shift_left(int32_t a, int32_t b) { return int32_t(uint32_t(a) << b); }
FXPREC_INLINE float add(float a, float b) { return a + b; }
FXPREC_INLINE float sub(float a, float b) { return a - b; }
FXPREC_INLINE float mul(float a, float b) { return a * b; }
FXPREC_INLINE float maximum(float a, float b) { return (a > b) | (a != a) ? a : b; }
}  // namespace
"""


@cache
def source() -> str:
    """Return the text that takes the place of ``MARK``."""
    return kept("codec", printed)


def printed() -> str:
    """Print `source`."""
    fields = "".join(f"  int32_t {name};\n" for name in (*_FIELDS, *_LIMITS))
    functions = (
        function("nearest", {"x": "float"}, lambda x, row, code: codec.nearest(x, row)),
        function("nearest_finite", {"x": "float"}, lambda x, row, code: codec.nearest_finite(x, row)),
        function("codes", {"x": "float"}, codec.codes, "int32_t"),
        function("numbers", {"code": "int"}, codec.numbers),
        "struct Stored { int32_t code; float value; };\n" + function("stored", {"x": "float"}, codec.stored, "Stored"),
    )
    struct = f"// The meaning of each is in fxprec/numerics/rows.py.\nstruct Format {{\n{fields}}};\n"
    return "\n".join((PRELUDE, struct, "namespace {", *functions, "}  // namespace\n"))


def with_codec(text: str) -> str:
    """Return a kernel's source with the codec inserted."""
    assert MARK in text
    return text.replace(MARK, source())


_NAMES: Mapping[str, Name] = {name: Name(f"f.{name}", f"float_of(f.{name})") for name in _FIELDS}


def function(
    name: str, own: Mapping[str, Kind], text: Callable[..., Tensor | tuple[Tensor, ...]], result: str = "float"
) -> str:
    """Print ``text(*own, row, code)`` as a C++ function; a pair is returned as a struct ``result`` of its values."""

    def run(*values: Tensor) -> Tensor | tuple[Tensor, ...]:
        fields = values[len(own) :]
        row = FormatRow(0, *fields[: len(_FORMAT)])
        return text(*values[: len(own)], row, CodeRow(*fields[len(_FORMAT) :]))

    lines, outputs = statements(trace(run, {**own, **dict.fromkeys(_FIELDS, "int_scalar")}), CPP, _NAMES)
    values = ", ".join(outputs.values())
    lines.append(f"return {{{values}}};" if len(outputs) > 1 else f"return {values};")
    body = "".join(f"  {line}\n" for line in lines)
    arguments = "".join(f"{'float' if kind == 'float' else 'int32_t'} {name}, " for name, kind in own.items())
    return f"FXPREC_INLINE {result} {name}({arguments}const Format& f) {{\n{body}}}\n"
