"""Number formats: `Format`, the named ones, and `parse`."""

from fxprec.numerics.formats import (
    APS_121,
    APS_130,
    BF16,
    E4M3FN,
    E4M3FN_NAN,
    E5M2,
    E5M2_SAT,
    FP16,
    FP16_169,
    FP16_SAT,
    FP32,
    HFP8_143,
    HFP8_152,
    NAMED,
    Format,
    parse,
)

__all__ = [
    "APS_121",
    "APS_130",
    "BF16",
    "E4M3FN",
    "E4M3FN_NAN",
    "E5M2",
    "E5M2_SAT",
    "FP16",
    "FP16_169",
    "FP16_SAT",
    "FP32",
    "HFP8_143",
    "HFP8_152",
    "NAMED",
    "Format",
    "parse",
]
