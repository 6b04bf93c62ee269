"""A scale of its own for every stored gradient: a power of two from the largest magnitude seen.

The gradient between two sites is unscaled float32 or bfloat16, which does not underflow; only its stored copy is
narrow. So each site multiplies by ``2**k`` when it stores and by ``2**-k`` when it reads, and nothing downstream
needs to know.
"""

from __future__ import annotations

import math

from fxprec.formats import Format
from fxprec.runtime.table import MAX_SCALE_EXP

# Room for gradients to grow between two refreshes before they saturate: 2**3.
HEADROOM_EXP = 3


def scale_exp(amax: float, fmt: Format) -> int | None:
    """Return the exponent k that puts ``amax * 2**k`` ``HEADROOM_EXP`` below ``fmt.largest``, rounded down.

    None when ``amax`` says nothing: zero, infinite or NaN.
    """
    if not (0.0 < amax < math.inf):
        return None
    _, largest_exp = math.frexp(fmt.largest)
    _, amax_exp = math.frexp(amax)
    k = largest_exp - 1 - HEADROOM_EXP - amax_exp
    return max(-MAX_SCALE_EXP, min(MAX_SCALE_EXP, k))
