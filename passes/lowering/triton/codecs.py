"""Functions that generated kernels call beside the codec's, and the statistics of what they store."""

from __future__ import annotations

import math

from fxprec.ir.symbolic import CARRIED, MEASURE, STATS, TABLE_COLUMNS, UNMEASURED
from fxprec.numerics import device, rows
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import FormatRow, format_row

BITS = "to(tl.int32, bitcast=True)"
FLOAT = "to(tl.float32, bitcast=True)"

HELPERS: dict[str, str] = {
    "power": device.POWER,
    "product": '''@triton.jit
def product(a, b):
    """a * b, rounded to float32 before anything is added to it: no compiler contracts this to an fma."""
    if INTERPRETED:
        return a * b
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)
''',
    "as_bfloat16": device.bfloat16_source("as_bfloat16"),
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
    "round_by_table": device.by_table_source("round_by_table"),
}
"""Functions by name, in the order in which they are printed."""


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
    measure = tl.load(entry + {MEASURE})
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
        tl.store(counters + {STRIPES * COUNTERS + 1}, tl.load(entry + {CARRIED}))
        tl.store(counters + {STRIPES * COUNTERS + 2}, tl.load(entry) if IS_SCALED else 0)
        tl.store(counters + {STRIPES * COUNTERS + 3}, measure)
'''
ROW = TABLE_COLUMNS


def thresholds(name: str) -> tuple[str, str]:
    """Return literals: float bits from which a magnitude overflows, and up to which it underflows."""
    over, under = rows.thresholds(format_row(parse(name)))
    return str(over), str(under)


def _column(name: str) -> str:
    return f"tl.load({{0}} + {FormatRow._fields.index(name)})"


TABLE_THRESHOLDS = (
    f"{_column('largest')} + tl.maximum((1 << {_column('shift')}) >> 1, 1)",
    _column("underflow"),
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
