"""ATen operators as Triton expressions: everything that the generator can print. Data only.

Every value is float32 or bool inside a kernel. Products are rounded before anything is added to them. Divisions and
square roots are rounded correctly. Comparisons treat NaN as ATen does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxprec.ir.operators import Moves, moving_as

aten = torch.ops.aten

EXPRESSIONS: Mapping[str, str] = {
    "aten.add.Tensor": "{0} + {1}",
    "aten.add.Scalar": "{0} + {1}",
    "aten.sub.Tensor": "{0} - {1}",
    "aten.sub.Scalar": "{0} - {1}",
    "aten.mul.Tensor": "product({0}, {1})",
    "aten.mul.Scalar": "product({0}, {1})",
    "aten.div.Tensor": "tl.div_rn({0}, {1})",
    "aten.div.Scalar": "tl.div_rn({0}, {1})",
    "prims.fma.default": "product({0}, {1}) + {2}",
    "aten.neg.default": "-{0}",
    "aten.abs.default": "tl.abs({0})",
    "aten.reciprocal.default": "tl.div_rn(1.0, {0})",
    "aten.sqrt.default": "tl.sqrt_rn({0})",
    "aten.rsqrt.default": "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    "aten.relu.default": "tl.where({0} < 0.0, 0.0, {0})",
    "aten.maximum.default": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "aten.minimum.default": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "aten.clamp_min.default": "tl.where({0} < {1}, {1}, {0})",
    "aten.clamp_max.default": "tl.where({0} > {1}, {1}, {0})",
    "aten.where.self": "tl.where({0}, {1}, {2})",
    "aten.exp.default": "tl.exp({0})",
    "aten.exp2.default": "tl.exp2({0})",
    "aten.log.default": "tl.log({0})",
    "aten.log2.default": "tl.log2({0})",
    "aten.erf.default": "tl.erf({0})",
    "aten.sin.default": "tl.sin({0})",
    "aten.cos.default": "tl.cos({0})",
    "aten.sigmoid.default": "tl.div_rn(1.0, 1.0 + tl.exp(-{0}))",
    "aten.tanh.default": "tanh({0})",
    **{
        f"aten.{name}.{overload}": f"{{0}} {sign} {{1}}"
        for name, sign in (("le", "<="), ("lt", "<"), ("ge", ">="), ("gt", ">"), ("eq", "=="), ("ne", "!="))
        for overload in ("Scalar", "Tensor")
    },
    "aten.logical_and.default": "{0} & {1}",
    "aten.logical_or.default": "{0} | {1}",
    "aten.logical_not.default": "{0} == 0",
    "aten.bitwise_and.Tensor": "{0} & {1}",
    "aten.bitwise_or.Tensor": "{0} | {1}",
    "prims.convert_element_type.default": "{0}",
    "aten.clone.default": "{0}",
}
"""The Triton expression of each operator, with ``{0}``, ``{1}``, ... for its arguments."""

POWERS: Mapping[object, str] = {
    1.0: "{0}",
    2.0: "product({0}, {0})",
    3.0: "product(product({0}, {0}), {0})",
    0.5: "tl.sqrt_rn({0})",
    -0.5: "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    -1.0: "tl.div_rn(1.0, {0})",
    -2.0: "tl.div_rn(1.0, product({0}, {0}))",
}
"""``aten.pow.Tensor_Scalar`` by exponent; others are left to Inductor."""

OF_BOOLS: Mapping[str, str] = {"aten.mul.Tensor": "{0} & {1}", "aten.add.Tensor": "{0} | {1}"}
"""Operators with another meaning if both arguments are bool."""

INEXACT = frozenset({"exp", "exp2", "log", "log2", "erf", "sin", "cos", "sigmoid", "tanh", "sqrt", "rsqrt", "pow"})
"""Functions that ATen does not round correctly on every device; here square roots are rounded correctly."""

REDUCTIONS = frozenset({aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dims})
"""Reductions of the last dimension with one result. `aten.var_mean.correction` has two and is not included."""

FLAT_VIEWS = moving_as(Moves.SHAPE, Moves.RANK, Moves.ALIAS)
"""Views that keep elements in row-major order; a kernel emits no code for them."""

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
VALUES = FLOATS | {torch.bool}
BYTES = frozenset({torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2})
CODES = frozenset(
    {torch.uint8, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16}
)


def name_of(target: object) -> str:
    """Return ``mul`` for ``aten.mul.Tensor``."""
    return str(target).split(".")[1]
