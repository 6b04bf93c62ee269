"""Rows of the operators that passes insert (`fxprec.ir.symbolic`)."""

from __future__ import annotations

from fxprec.ir import symbolic as symbolic  # declares the operators
from fxprec.ir.operators.names import row
from fxprec.ir.operators.spec import Cost, Trait

ROWS = (
    row(
        "fxprec.quantize fxprec.dequantize fxprec.keep_nonfinite fxprec.keep_codes fxprec.rescale",
        traits=Trait.HANDS_ON_VALUES,
        cost=Cost.FUSED,
    ),
    row("fxprec.pack_bits fxprec.unpack_bits", cost=Cost.FUSED),
    row("fxprec.in_memory", cost=Cost.REDUCED),
)
