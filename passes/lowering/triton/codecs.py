"""Functions that generated kernels call beside the codec's, and the counting of what they store."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from fxprec.ir.symbolic import CARRIED, MEASURE, TABLE_COLUMNS
from fxprec.numerics import device, rows, stats
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import FormatRow, format_row

BITS = "to(tl.int32, bitcast=True)"
FLOAT = "to(tl.float32, bitcast=True)"

HELPERS: dict[str, str | Callable[[str], str]] = {
    "power": device.POWER,
    "product": '''@triton.jit
def product(a, b):
    """a * b, rounded to float32 before anything is added to it: no compiler contracts this to an fma."""
    if INTERPRETED:
        return a * b
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)
''',
    "as_bfloat16": device.bfloat16_source,
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
    "keep_codes": f"""@triton.jit
def keep_codes(code, x, inf, nan, sign):
    \"\"\"``code`` where x is finite; elsewhere the code of inf or NaN, with x's sign.\"\"\"
    bits = x.{BITS}
    magnitude = bits & 0x7FFFFFFF
    special = tl.where(magnitude > 0x7F800000, nan, inf) | tl.where(bits < 0, sign, 0)
    return tl.where(magnitude < 0x7F800000, code, special)
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
    "round_by_table": device.by_table_source,
}
"""Source of each function, or a function that prints it; in the order in which they are printed."""


@cache
def helper(name: str) -> str:
    """Return the source of a function of `HELPERS`."""
    found = HELPERS[name]
    return found if isinstance(found, str) else found(name)


COUNT = f'''{stats.DEVICE_SOURCE}

@triton.jit
def count(x, stored, inside, entry, counters, elements, over_from, under_to, IS_SCALED: tl.constexpr):
    """Count what rounding ``stored`` does, which is ``x`` after scaling; moments where the table asks for them."""
    factor = power(tl.load(entry)) if IS_SCALED else 1.0
    count_lost(largest_bits(x, inside), stored, inside, factor, counters, over_from, under_to)
    measure = tl.load(entry + {MEASURE})
    if measure != 0:
        count_moments(stored, inside, counters)
    note_facts(counters, elements, tl.load(entry + {CARRIED}), tl.load(entry) if IS_SCALED else 0, measure)
'''
ROW = TABLE_COLUMNS


def thresholds(name: str) -> tuple[str, str]:
    """Return two literals, as float bits: overflow begins at the first magnitude, underflow ends at the second."""
    over, under = rows.thresholds(format_row(parse(name)))
    return str(over), str(under)


def _column(name: str) -> str:
    return f"tl.load({{0}} + {FormatRow._fields.index(name)})"


TABLE_THRESHOLDS = (
    f"{_column('largest')} + tl.maximum((1 << {_column('shift')}) >> 1, 1)",
    _column("underflow"),
)
"""The same thresholds for the format in a row of the table."""
