"""Source of the functions that round, pack and unpack inside a kernel: the integer codec, one pair per format.

The same maths as `fxprec.numerics.codec`, with a format's constants folded in, so every device gives the bits of the
reference: hardware casts are not used, since which of them round alike (NaN, saturation, subnormals) differs by
architecture.
"""

from __future__ import annotations

import math
import re

from fxprec.ir.symbolic import STATS, TABLE_COLUMNS, UNMEASURED
from fxprec.numerics import codec
from fxprec.numerics.formats import Format, parse

BITS = "to(tl.int32, bitcast=True)"
FLOAT = "to(tl.float32, bitcast=True)"

HELPERS: dict[str, str] = {
    "power": f'''@triton.jit
def power(exponent):
    """2.0 ** exponent, exactly."""
    return ((exponent + 127) << 23).{FLOAT}
''',
    "product": '''@triton.jit
def product(a, b):
    """a * b, rounded to float32 before anything is added to it: no compiler contracts this to an fma."""
    if INTERPRETED:
        return a * b
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)
''',
    "as_bfloat16": f'''@triton.jit
def as_bfloat16(x):
    """Nearest bfloat16, ties to even, as float32."""
    bits = x.{BITS}
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x != x, x, even.{FLOAT})
''',
    "as_float16": '''@triton.jit
def as_float16(x):
    """Nearest float16, ties to even, as float32."""
    return x.to(tl.float16).to(tl.float32)
''',
    "tanh": '''@triton.jit
def tanh(x):
    """Near 0 a polynomial (Cephes), elsewhere from exp: within 2 units in the last place."""
    a = tl.abs(x)
    s = x * x
    p = ((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s
    p = (p + 1.33314422036e-1) * s - 3.33332819422e-1
    far = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * a) + 1.0)
    return tl.where(a < 0.625, x + x * s * p, tl.where(x < 0.0, -far, far))
''',
    "is_finite": f"""@triton.jit
def is_finite(x):
    return (x.{BITS} & 0x7FFFFFFF) < 0x7F800000
""",
    "row_max": '''@triton.jit
def row_max(x, inside):
    """Largest of each row; NaN where there is one."""
    largest = tl.max(tl.where(inside, x, float("-inf")), axis=1, keep_dims=True)
    spoilt = tl.max(tl.where(inside & (x != x), 1, 0), axis=1, keep_dims=True)
    return tl.where(spoilt > 0, float("nan"), largest)
''',
    "row_sum": """@triton.jit
def row_sum(x, inside):
    return tl.sum(tl.where(inside, x, 0.0), axis=1, keep_dims=True)
""",
    "row_any": """@triton.jit
def row_any(x, inside):
    return tl.max(tl.where(inside & x, 1, 0), axis=1, keep_dims=True) > 0
""",
    "round_by_table": f'''@triton.jit
def round_by_table(x, entry):
    """Nearest even in the format that a row of the scale table holds; NaN stays."""
    shift = tl.load(entry + 1)
    min_normal = tl.load(entry + 3)
    magic = tl.load(entry + 4).{FLOAT}
    bits = x.{BITS}
    a = bits & 0x7FFFFFFF
    tie = ((a >> shift) & 1) * ((min_normal & 3) - 1)
    normal = ((a + tl.load(entry + 2) + tie) >> shift) << shift
    subnormal = ((a.{FLOAT} + magic) - magic).{BITS}
    rounded = tl.where(a < min_normal, subnormal, normal)
    rounded = tl.where(rounded > tl.load(entry + 5), tl.load(entry + 6), rounded)
    rounded = tl.where(a > 0x7F800000, a, rounded)
    return (rounded | (bits & -0x80000000)).{FLOAT}
''',
}
"""Functions by name, in the order in which they are printed."""


def identifier(fmt: str) -> str:
    """Return a format's name as part of a Python name: ``1-4-3+4`` becomes ``1_4_3_p4``."""
    return re.sub(r"\W", "_", fmt.replace("+", "_p"))


def encoder(name: str) -> tuple[str, str]:
    """Return the name and source of the function from float32 to the codes of a format, as int32."""
    fmt = parse(name)
    row, top = codec.format_row(fmt), fmt.bits - 1
    parity = (row.min_normal & 3) - 1
    rebias = (127 - fmt.offset) << 23
    tie = {0: "", 1: f" + ((a >> {row.shift}) & 1)", -1: f" - ((a >> {row.shift}) & 1)"}[parity]
    function = f"encode_{identifier(name)}"
    lines = [f"bits = x.{BITS}", "a = bits & 0x7FFFFFFF"]
    if fmt.nan_code is None and fmt.offset >= 127:
        lines.append("a = tl.minimum(a, 0x7F800000)  # the sum below stays an int32")
    lines += [
        f"normal = (a + {row.addend - rebias}{tie}) >> {row.shift}",
        f"subnormal = (a.{FLOAT} + {codec.as_float(row.magic)!r}).{BITS} - {row.magic}",
        f"code = tl.minimum(tl.where(a < {row.min_normal}, subnormal, normal), {fmt.overflow_code})",
    ]
    if fmt.nan_code is not None:
        lines.append(f"code = tl.where(a > 0x7F800000, {fmt.nan_code}, code)")
    sign = 1 << top if top < 31 else -0x80000000
    lines.append(f"return code | ((bits >> {31 - top}) & {sign})")
    return function, _function(function, "x", f"Codes of {fmt.name}: nearest even, {_beyond(fmt)}.", lines)


def _beyond(fmt: Format) -> str:
    return {"saturate": "saturating", "inf": "inf beyond the largest", "nan": "NaN beyond the largest"}[
        str(fmt.overflow)
    ]


def decoder(name: str) -> tuple[str, str]:
    """Return the name and source of the function from codes (int32, upper bits ignored) to float32."""
    fmt = parse(name)
    shift, top = 23 - fmt.mantissa_bits, fmt.bits - 1
    function = f"decode_{identifier(name)}"
    lines = []
    if top < 31:
        mask = codec.SIGN | ((1 << top) - 1) << shift
        lines.append(f"wide = ((code << {31 - top}) >> {8 - fmt.exponent_bits}) & {mask}")
    else:
        lines.append("wide = code")
    lines.append(f"value = wide.{FLOAT}")
    exponent = fmt.min_exponent + 126
    while exponent > 127:
        lines.append(f"value = value * {2.0**127!r}")
        exponent -= 127
    if exponent:
        lines.append(f"value = value * {2.0**exponent!r}  # float32's subnormals stand for the format's")
    if fmt.largest_code < (1 << top) - 1:
        special = {"fn": 'float("nan")', "ieee": f"(wide | 0x7F800000).{FLOAT}"}.get(
            fmt.specials, f"((wide & -0x80000000) | 0x7F800000).{FLOAT}"
        )
        lines.append(f"value = tl.where((wide & 0x7FFFFFFF) > {fmt.largest_code << shift}, {special}, value)")
    return function, _function(function, "code", f"Numbers of {fmt.name}.", [*lines, "return value"])


def _function(name: str, argument: str, doc: str, lines: list[str]) -> str:
    body = "".join(f"    {line}\n" for line in [f'"""{doc}"""', *lines])
    return f"@triton.jit\ndef {name}({argument}):\n{body}"


STRIPES = 32
"""Copies of a site's counters: programs add to one of them each, since atomics on one address take turns."""
COUNTERS = 8
"""Columns: overflows, underflows, amax (float bits), non-zeros, sum of squares, of logarithms, of their squares, none.

The row after the stripes holds: elements, carried exponent, scale exponent, whether moments were measured."""
SITE_COUNTERS = (STRIPES + 1) * COUNTERS

STATISTICS = f'''@triton.jit
def add_statistics(x, stored, inside, entry, counters, elements, over_from, under_to, IS_SCALED: tl.constexpr):
    """Count what rounding ``stored`` does and take the largest of ``x``: one atomic a program and number."""
    program = tl.program_id(0)
    at = counters + (program % {STRIPES}) * {COUNTERS}
    bits = stored.{BITS} & 0x7FFFFFFF
    over = tl.sum(tl.where(inside & (bits >= over_from), 1, 0).to(tl.int32))
    tl.atomic_add(at, over, mask=over > 0)
    under = tl.sum(tl.where(inside & (bits > 0) & (bits <= under_to), 1, 0).to(tl.int32))
    tl.atomic_add(at + 1, under, mask=under > 0)
    amax = tl.max(tl.where(inside, x.{BITS} & 0x7FFFFFFF, 0))
    tl.atomic_max(at + 2, amax, mask=amax > tl.load(at + 2))
    measure = tl.load(entry + 9)
    if measure != 0:
        some = inside & (tl.abs(stored) > 0.0)
        logs = tl.where(some, tl.log(tl.where(some, tl.abs(stored), 1.0)), 0.0)
        sums = (at + 4).to(tl.pointer_type(tl.float32))
        tl.atomic_add(at + 3, tl.sum(tl.where(some, 1, 0).to(tl.int32)))
        tl.atomic_add(sums, tl.sum(tl.where(inside, stored * stored, 0.0)))
        tl.atomic_add(sums + 1, tl.sum(logs))
        tl.atomic_add(sums + 2, tl.sum(logs * logs))
    if program == 0:
        tl.store(counters + {STRIPES * COUNTERS}, elements)
        tl.store(counters + {STRIPES * COUNTERS + 1}, tl.load(entry + 8))
        tl.store(counters + {STRIPES * COUNTERS + 2}, tl.load(entry) if IS_SCALED else 0)
        tl.store(counters + {STRIPES * COUNTERS + 3}, measure)
'''
ROW = TABLE_COLUMNS


def thresholds(name: str) -> tuple[str, str]:
    """Return literals: float bits from which a magnitude overflows, and up to which it underflows."""
    row = codec.format_row(parse(name))
    return str(codec.overflow_threshold(row.shift, row.largest)), str(row.underflow)


TABLE_THRESHOLDS = (
    "tl.load({0} + 5) + tl.maximum((1 << tl.load({0} + 1)) >> 1, 1)",
    "tl.load({0} + 7)",
)
"""The same of the format that a row of the table holds."""

FINISH_NAME = "fxprec_finish_statistics"
FINISH = f'''import triton
import triton.language as tl


@triton.jit
def {FINISH_NAME}(counters, out0):
    """From the counters of a site to its row of statistics: a program each."""
    site = tl.program_id(0)
    at = counters + site * {SITE_COUNTERS}
    stripe = at + tl.arange(0, {STRIPES}) * {COUNTERS}
    facts = at + {STRIPES * COUNTERS}
    elements = tl.maximum(tl.load(facts), 1).to(tl.float64)
    carried = tl.load(facts + 1)
    taken_off = carried + tl.load(facts + 2)
    amax = tl.max(tl.load(stripe + 2)).{FLOAT}
    out = out0 + site * {len(STATS)}
    tl.store(out, tl.sum(tl.load(stripe)).to(tl.float64) / elements)
    tl.store(out + 1, tl.sum(tl.load(stripe + 1)).to(tl.float64) / elements)
    tl.store(out + 2, amax.to(tl.float64) * ((1023 - carried).to(tl.int64) << 52).to(tl.float64, bitcast=True))
    if tl.load(facts + 3) != 0:
        sums = (stripe + 4).to(tl.pointer_type(tl.float32))
        nonzero = tl.sum(tl.load(stripe + 3)).to(tl.float64)
        some = tl.maximum(nonzero, 1.0)
        mean = tl.sum(tl.load(sums + 1).to(tl.float64)) / some
        variance = tl.maximum(tl.sum(tl.load(sums + 2).to(tl.float64)) / some - mean * mean, 0.0)
        rms = tl.sqrt(tl.sum(tl.load(sums).to(tl.float64)) / elements)
        tl.store(out + 3, rms * ((1023 - taken_off).to(tl.int64) << 52).to(tl.float64, bitcast=True))
        tl.store(out + 4, nonzero / elements)
        tl.store(out + 5, tl.where(nonzero > 0, mean - taken_off * {math.log(2)!r}, 0.0))
        tl.store(out + 6, tl.sqrt(variance))
    else:
        tl.store(out + 3, {UNMEASURED[0]!r})
        tl.store(out + 4, {UNMEASURED[1]!r})
        tl.store(out + 5, {UNMEASURED[2]!r})
        tl.store(out + 6, {UNMEASURED[3]!r})
'''
FINISH_PARAMETERS = (("counters", "*i32"), ("out0", "*fp32"))
