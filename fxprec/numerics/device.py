"""Print the codec in Triton with a format's constants folded in, one function per direction.

No hardware cast is used. Hardware casts differ between architectures in NaN, saturation and subnormals, and the
interpreter's float8 cast does not round to nearest. So sm_80, newer devices and the interpreter give the same codes.
`caster` is the exception, for a kernel whose time is bound by instructions; `runtime.gemm.hardware_casts` compares it
with the definition before it is used.
A kernel takes a function as a compile-time argument (`encoder`, `decoder`, `rounder`), or the function's source is
printed into generated code (`encoder_source`, ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxprec import compat
from fxprec.numerics import codec, special
from fxprec.numerics.dialects import TRITON
from fxprec.numerics.formats import BF16, Format, kept_codes
from fxprec.numerics.printer import Name, statements
from fxprec.numerics.rows import INFINITY, MAGNITUDE, FormatRow, format_row
from fxprec.numerics.trace import Kind, trace

IMPORTS = "import triton\nimport triton.language as tl\n\n\n"


def identifier(fmt: Format) -> str:
    """Return a format's name as part of a Python name: ``1-4-3+4`` becomes ``1_4_3_p4``."""
    return re.sub(r"\W", "_", fmt.name.replace("+", "_p"))


def encoder_source(fmt: Format, *, keep: bool = False) -> tuple[str, str]:
    """Return name and source of the function from float32 to int32 codes, rounding to nearest even.

    With ``keep`` inf gets the format's code of inf, or else of NaN, even if the format saturates. It must have one.
    """
    beyond = {"saturate": "saturating", "inf": "inf beyond the largest", "nan": "NaN beyond the largest"}
    kept = kept_codes(fmt)[0] if keep else None
    name = f"encode_{identifier(fmt)}{'_keep' if keep else ''}"
    doc = f"Codes of {fmt.name}: nearest even, {beyond[str(fmt.overflow)]}{', inf kept' if keep else ''}."
    return name, function(name, {"x": "float"}, doc, lambda x: codec.folded_codes(x, fmt, kept))


def has_instruction(fmt: Format) -> bool:
    """Return whether GPUs of compute capability 8.9 and above round two numbers to a format in one instruction."""
    return fmt.overflow == "saturate" and fmt.torch_dtype in _INSTRUCTIONS


_INSTRUCTIONS = {torch.float8_e4m3fn: "cvt.rn.satfinite.e4m3x2.f32", torch.float8_e5m2: "cvt.rn.satfinite.e5m2x2.f32"}


def caster_source(fmt: Format, *, keep: bool = False) -> tuple[str, str]:
    """Return name and source of a function that computes `encoder_source`'s codes by the hardware's instruction.

    The instruction rounds to nearest even and saturates (PTX ISA, ``cvt``). It loses NaN's sign and code, and saturates
    infinities, which ``keep`` must keep. So if one of four numbers is NaN or such an infinity, a branch writes its
    code.
    """
    assert has_instruction(fmt)
    assert fmt.torch_dtype is not None
    name = f"cast_{identifier(fmt)}{'_keep' if keep else ''}"
    return (
        name,
        f'''@triton.jit
def {name}(x):
    """Codes of {fmt.name} by the hardware's cast."""
    return tl.inline_asm_elementwise(
        "{_casting(fmt, _INSTRUCTIONS[fmt.torch_dtype], keep)}",
        "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4)
''',
    )


def _casting(fmt: Format, cast: str, keep: bool) -> str:
    """Return PTX that casts $1 to $4 into the bytes of $0 by the instruction ``cast``."""
    infinity, nan, sign = kept_codes(fmt)
    inf = infinity if keep else None
    registers = ".reg .b16 low, high; .reg .f32 top, next; .reg .pred is; .reg .b32 size, sign, code"
    lines = [registers, f"{cast} low, $2, $1", f"{cast} high, $4, $3", "mov.b32 $0, {low, high}", "abs.f32 top, $1"]
    for i in (2, 3, 4):
        lines += [f"abs.f32 next, ${i}", "max.NaN.f32 top, top, next"]
    lines += ["setp.num.f32 is, top, top" if inf is None else f"setp.lt.f32 is, top, 0f{INFINITY:08X}", "@is bra done"]
    for i in (1, 2, 3, 4):
        lines += [f"mov.b32 size, ${i}", "shr.u32 sign, size, 24", f"and.b32 sign, sign, {sign}"]
        lines += [f"and.b32 size, size, {MAGNITUDE}"]
        for test, number in (("eq", inf), ("gt", nan)):
            if number is not None:
                lines += [f"setp.{test}.u32 is, size, {INFINITY}", f"or.b32 code, sign, {number}"]
                lines += [f"@is bfi.b32 $0, code, $0, {8 * (i - 1)}, 8"]
    return "{ " + "; ".join(lines) + "; done: }"


def decoder_source(fmt: Format) -> tuple[str, str]:
    """Return name and source of the function from int32 codes (upper bits ignored) to float32."""
    name = f"decode_{identifier(fmt)}"
    doc = f"Numbers of {fmt.name}."
    return name, function(name, {"code": "int"}, doc, lambda code: codec.folded_numbers(code, fmt))


def rounder_source(fmt: Format) -> tuple[str, str]:
    """Return name and source of the function that rounds float32 to nearest even; NaN stays NaN."""
    name, row = f"nearest_{identifier(fmt)}", format_row(fmt)
    return name, function(name, {"x": "float"}, f"Nearest {fmt.name}.", lambda x: codec.nearest(x, row))


def bfloat16_source(name: str) -> str:
    """Return the source of a function that rounds to the nearest bfloat16, ties to even, and returns float32."""
    row = format_row(BF16)
    doc = "Nearest bfloat16, ties to even, as float32."
    return function(name, {"x": "float"}, doc, lambda x: special.nearest_cut(x, row))


def by_table_source(name: str) -> str:
    """Return the source of a function that rounds to the format in a row of the scale table."""
    fields = FormatRow._fields[1:]
    used = [f for f in fields if f != "underflow"]
    loads = [f"{field} = tl.load(entry + {FormatRow._fields.index(field)})" for field in used]
    names = {"magic": Name("magic", "magic.to(tl.float32, bitcast=True)")}

    kinds: dict[str, Kind] = {"x": "float", **dict.fromkeys(fields, "int_scalar")}
    lines, outputs = statements(trace(lambda x, *row: codec.nearest(x, FormatRow(0, *row)), kinds), TRITON, names)
    doc = "Nearest even in the format that a row of the scale table holds; NaN stays."
    return _text(name, "x, entry", doc, [*loads, *lines, f"return {outputs['v0']}"])


def function(name: str, own: Mapping[str, Kind], doc: str, text: Callable[..., Tensor | tuple[Tensor, ...]]) -> str:
    """Print ``text(*own)`` as a Triton function with the same results."""
    lines, outputs = statements(trace(text, own), TRITON)
    return _text(name, ", ".join(own), doc, [*lines, f"return {', '.join(outputs.values())}"])


def _text(name: str, arguments: str, doc: str, lines: list[str]) -> str:
    body = "".join(f"    {line}\n" for line in [f'"""{doc}"""', *lines])
    return f"@triton.jit\ndef {name}({arguments}):\n{body}"


POWER = '''@triton.jit
def power(exponent):
    """2.0 ** exponent as float32, exactly, of an int32 in -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
'''


def _loader(source: Callable[..., tuple[str, str]]) -> Callable[..., Any]:
    """Return a function that loads what ``source`` prints, for a kernel that takes it as a compile-time argument."""

    @cache
    def loaded(*args: object, **options: object) -> Any:
        name, text = source(*args, **options)
        return compat.load_kernel(IMPORTS + text, name)

    return loaded


encoder, caster = _loader(encoder_source), _loader(caster_source)
decoder, rounder = _loader(decoder_source), _loader(rounder_source)
bfloat16 = _loader(lambda: ("as_bfloat16", bfloat16_source("as_bfloat16")))
power = _loader(lambda: ("power", POWER))
