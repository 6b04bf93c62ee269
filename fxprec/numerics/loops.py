"""Print the codec for Inductor's C++ loops on a CPU, with a format's constants folded in."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from torch import Tensor

from fxprec.numerics import codec
from fxprec.numerics.dialects import LOOPS
from fxprec.numerics.formats import Format
from fxprec.numerics.printer import statements
from fxprec.numerics.rows import code_row, format_row
from fxprec.numerics.trace import Kind, trace

Direction = Literal["encode", "decode"]

_BITS = (
    "auto bits_of = [](F v) { I b; std::memcpy(&b, &v, sizeof b); return b; };"
    " auto float_of = [](I b) { F v; std::memcpy(&v, &b, sizeof v); return v; };"
)
_OF_VECTORS = (
    f"{_BITS} auto choose = [](I mask, I a, I b) {{ return I::blendv(b, a, mask); }};"
    " auto least = [](I a, I b) { return at::vec::minimum(a, b); };"
    " auto shift_left = [](I a, I b) { return a << b; };"
)
_OF_NUMBERS = (
    f"{_BITS} auto choose = [](bool is, I a, I b) {{ return is ? a : b; }};"
    " auto least = [](I a, I b) { return a < b ? a : b; };"
    " auto shift_left = [](I a, I b) { return I(uint32_t(a) << b); };"
)


@lru_cache(maxsize=256)
def loop_function(direction: Direction, fmt: Format, floats: str, ints: str) -> str:
    """Return a C++ lambda from float32 to int32 codes of a format, or back.

    ``floats`` and ``ints`` are its types: ``float`` and ``int32_t``, or equally many of each in an
    ``at::vec::Vectorized`` or ``VectorizedN``.
    """
    encodes = direction == "encode"
    kind: Kind = "float" if encodes else "int"

    def run(x: Tensor) -> Tensor:
        return codec.folded_codes(x, fmt) if encodes else codec.numbers(x, format_row(fmt), code_row(fmt))

    lines, outputs = statements(trace(run, {"x": kind}), LOOPS)
    helpers = _OF_NUMBERS if floats == "float" else _OF_VECTORS
    body = " ".join((f"using F = {floats}; using I = {ints}; {helpers}", *lines, f"return {outputs['v0']};"))
    return f"[]({floats if encodes else ints} x) {{ {body} }}"
