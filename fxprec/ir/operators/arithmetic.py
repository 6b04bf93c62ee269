"""Rows of arithmetic, activations, comparisons and reductions."""

from __future__ import annotations

from fxprec.ir.operators.names import Row, row
from fxprec.ir.operators.spec import FIRST, Cost, HighReason, Terms, Trait

_SUM: Terms = ((0,), (1,))
_PRODUCT: Terms = ((0, 1),)
_AFFINE = Trait.AFFINE | Trait.COMBINES
_ADDS = _AFFINE | Trait.PASSES_SCALE
_SCALED = Trait.COMBINES | Trait.HANDS_ON_DIVISOR
_OF_TWO = Trait.WRITES_NEW_OF_TWO


def _light(names: str, **columns: object) -> Row:
    return row(names, cost=Cost.LIGHT, **columns)


POINTWISE = (
    _light("add.Tensor", terms=_SUM, hands_on="any", traits=_ADDS | Trait.HANDS_ON_DIVISOR | _OF_TWO | Trait.MASKS),
    _light("add.Scalar", terms=_SUM, hands_on="first", traits=_ADDS | Trait.HANDS_ON_DIVISOR),
    _light("sub.Tensor", terms=_SUM, hands_on="any", traits=_ADDS | _OF_TWO),
    _light("sub.Scalar", terms=_SUM, hands_on="first", traits=_ADDS),
    _light("rsub.Tensor", terms=_SUM, hands_on="any", traits=Trait.PASSES_SCALE),
    _light("rsub.Scalar", hands_on="first"),
    _light(
        "mul.Tensor", terms=_PRODUCT, hands_on="any", traits=_AFFINE | Trait.HANDS_ON_DIVISOR | _OF_TWO | Trait.SCALES
    ),
    _light("mul.Scalar", terms=_PRODUCT, hands_on="first", traits=_AFFINE | Trait.HANDS_ON_DIVISOR | Trait.SCALES),
    _light("div.Tensor", terms=FIRST, hands_on="first", divisor_at=1, traits=_SCALED | _OF_TWO | Trait.SCALES),
    _light("div.Scalar", terms=FIRST, hands_on="first", divisor_at=1, traits=Trait.HANDS_ON_DIVISOR | Trait.SCALES),
    _light("neg", terms=FIRST, hands_on="first", traits=_AFFINE | Trait.HANDS_ON_DIVISOR),
    _light("abs", traits=_SCALED),
    _light("addcmul", terms=((0,), (1, 2))),
    _light("prims.fma", terms=((0, 1), (2,))),
    _light("clamp clamp_min", hands_on="first", traits=Trait.HANDS_ON_DIVISOR),
    _light("clamp_max clamp_min.Tensor clamp_max.Tensor", hands_on="first"),
    _light(
        "clamp.Tensor",
        hands_on="any",
        operands=HighReason("backward tests on which side of another tensor it lies, and that tensor is rounded too"),
    ),
    _light("maximum minimum", hands_on="any"),
    _light("reciprocal rsqrt sqrt", divisor_at=0),
    row("log log2 log10", divisor_at=0, traits=Trait.HEAVY),
    row("exp log1p", traits=Trait.HEAVY),
    row("sigmoid", traits=Trait.HEAVY | Trait.WRITES_NEW | Trait.SATURATES),
    _light("relu", traits=Trait.WRITES_NEW),
    row("gelu silu _softmax _log_softmax", traits=Trait.WRITES_NEW),
    row("tanh", traits=Trait.HEAVY | Trait.WRITES_NEW | Trait.SCALES | Trait.SATURATES),
    row("erf", traits=Trait.SATURATES),
    _light("le.Scalar gt.Scalar", traits=Trait.TESTS_ABOVE),
    _light("ge.Scalar lt.Scalar", traits=Trait.TESTS_BELOW),
    _light("sgn sign", traits=Trait.TESTS_ABOVE | Trait.TESTS_BELOW),
    _light("lt.Tensor gt.Tensor le.Tensor ge.Tensor", traits=Trait.ORDERS),
)

REDUCTIONS = (
    row("sum sum.dim_IntList mean mean.dim", terms=FIRST, traits=Trait.SUMS, cost=Cost.REDUCED),
    row("prims.sum", terms=FIRST, traits=Trait.SUMS),
    row("cumsum", terms=FIRST, cost=Cost.REDUCED),
    row(
        "amax amin var.correction var_mean.correction std.correction any any.dim all all.dim argmax argmin prod"
        " prod.dim_int max.dim min.dim logcumsumexp linalg_vector_norm",
        cost=Cost.REDUCED,
    ),
)

ROWS = POINTWISE + REDUCTIONS
