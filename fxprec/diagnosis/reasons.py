"""Explain why a stored tensor does its damage, as a phrase."""

from __future__ import annotations

from fxprec.diagnosis.lab import Cast
from fxprec.diagnosis.rounding import Lost
from fxprec.numerics.bias import Bias
from fxprec.numerics.blocks import AnyFormat, BlockFormat
from fxprec.numerics.formats import parse
from fxprec.plan import Site

# Shares of elements from which on a loss is named before the rounding itself.
WORTH_NAMING = 0.001
ZEROED = 0.05
WRONG_SCALE = 0.25  # relative, of the gain; rounding to 4-bit formats changes it by a tenth
AMPLIFIED = 4.0  # damage over the tensor's own error


def reason(cast: Cast, site: Site, fmt: AnyFormat, found: Lost, bias: Bias, damage: float) -> str:
    """Return the first fault that is found, or else what the damage consists of."""
    biased = f"biased: it is rounded {bias}" if bias.is_biased else ""
    for text in (_decoded(cast, fmt), _range(found, fmt), _scale(found), biased, _spoiled(site, found, damage)):
        if text:
            return text
    return f"rounding: relative error {found.error:.2g}" + (f"; {site.why}" if site.why else "")


def _decoded(cast: Cast, fmt: AnyFormat) -> str:
    if isinstance(fmt, BlockFormat) or cast.call.is_simulated:
        return ""
    wrong = next((r.format for r in cast.reads if not parse(r.format).has_numbers_of(fmt)), None)
    if wrong is None:
        return ""
    return f"stored as {fmt.name} and read back as {wrong}: its codes mean other numbers"


def _range(found: Lost, fmt: AnyFormat) -> str:
    if found.largest != found.largest:
        return "it holds NaN before it is stored: no format helps"
    if found.largest == float("inf"):
        return "it holds inf before it is stored: no format helps"
    if not isinstance(fmt, BlockFormat) and found.overflow >= WORTH_NAMING and found.error > 0.01:
        return (
            f"{found.overflow:.2g} of its elements overflow: they reach {found.largest:.3g}, and {fmt.name} ends at "
            f"{fmt.largest:g}"
        )
    return ""


def _scale(found: Lost) -> str:
    if found.underflow >= ZEROED and found.gain < 1 - WRONG_SCALE:
        return ""
    if abs(found.gain - 1) > WRONG_SCALE and not found.overflow:
        return f"it is read back {found.gain:.3g} times as large: its scale is wrong"
    return ""


def _spoiled(site: Site, found: Lost, damage: float) -> str:
    if found.underflow >= ZEROED and found.error > 0.01:
        return f"{found.underflow:.2g} of its elements underflow to zero: the largest is {found.largest:.3g}"
    if damage > AMPLIFIED * found.error > 0:
        more = f"; {site.why}" if site.why else ""
        return f"backward amplifies its relative error of {found.error:.2g} by {damage / found.error:.3g}{more}"
    return ""
