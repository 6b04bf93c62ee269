"""Rows of arithmetic, activations, comparisons and reductions."""

from __future__ import annotations

from fxprec.ir.operators.names import row
from fxprec.ir.operators.spec import FIRST, Cost, HighReason, Terms, Trait

_SUM: Terms = ((0,), (1,))
_PRODUCT: Terms = ((0, 1),)
_AFFINE = Trait.AFFINE | Trait.COMBINES
_ADDS = _AFFINE | Trait.PASSES_SCALE
_SCALED = Trait.COMBINES | Trait.HANDS_ON_DIVISOR
_OF_TWO = Trait.WRITES_NEW_OF_TWO

POINTWISE = (
    row("add.Tensor", terms=_SUM, hands_on="any", traits=_ADDS | Trait.HANDS_ON_DIVISOR | _OF_TWO | Trait.MASKS),
    row("add.Scalar", terms=_SUM, hands_on="first", traits=_ADDS | Trait.HANDS_ON_DIVISOR),
    row("sub.Tensor", terms=_SUM, hands_on="any", traits=_ADDS | _OF_TWO),
    row("sub.Scalar", terms=_SUM, hands_on="first", traits=_ADDS),
    row("rsub.Tensor", terms=_SUM, hands_on="any", traits=Trait.PASSES_SCALE),
    row("rsub.Scalar", hands_on="first"),
    row("mul.Tensor", terms=_PRODUCT, hands_on="any", traits=_AFFINE | Trait.HANDS_ON_DIVISOR | _OF_TWO | Trait.SCALES),
    row("mul.Scalar", terms=_PRODUCT, hands_on="first", traits=_AFFINE | Trait.HANDS_ON_DIVISOR | Trait.SCALES),
    row("div.Tensor", terms=FIRST, hands_on="first", divisor_at=1, traits=_SCALED | _OF_TWO | Trait.SCALES),
    row("div.Scalar", terms=FIRST, hands_on="first", divisor_at=1, traits=Trait.HANDS_ON_DIVISOR | Trait.SCALES),
    row("neg", terms=FIRST, hands_on="first", traits=_AFFINE | Trait.HANDS_ON_DIVISOR),
    row("abs", traits=_SCALED),
    row("addcmul", terms=((0,), (1, 2))),
    row("prims.fma", terms=((0, 1), (2,))),
    row("clamp clamp_min", hands_on="first", traits=Trait.HANDS_ON_DIVISOR),
    row("clamp_max clamp_min.Tensor clamp_max.Tensor", hands_on="first"),
    row(
        "clamp.Tensor",
        hands_on="any",
        operands=HighReason("backward tests on which side of another tensor it lies, and that tensor is rounded too"),
    ),
    row("maximum minimum", hands_on="any"),
    row("reciprocal rsqrt sqrt", divisor_at=0),
    row("log log2 log10", divisor_at=0, traits=Trait.HEAVY),
    row("exp log1p", traits=Trait.HEAVY),
    row("sigmoid", traits=Trait.HEAVY | Trait.WRITES_NEW | Trait.SATURATES),
    row("relu gelu silu _softmax _log_softmax", traits=Trait.WRITES_NEW),
    row("tanh", traits=Trait.HEAVY | Trait.WRITES_NEW | Trait.SCALES | Trait.SATURATES),
    row("erf", traits=Trait.SATURATES),
    row("le.Scalar gt.Scalar", traits=Trait.TESTS_ABOVE),
    row("ge.Scalar lt.Scalar", traits=Trait.TESTS_BELOW),
    row("sgn sign", traits=Trait.TESTS_ABOVE | Trait.TESTS_BELOW),
    row("lt.Tensor gt.Tensor le.Tensor ge.Tensor", traits=Trait.ORDERS),
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
