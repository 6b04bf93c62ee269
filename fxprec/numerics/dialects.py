"""The languages in which kernels are printed: C++, C++ in Inductor's loops, Triton."""

from __future__ import annotations

import torch

from fxprec.numerics.printer import Dialect


def _cpp_number(value: float, dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return f"int32_t({int(value)}ll)"
    if value != value:
        return '__builtin_nanf("")'
    if value in (torch.inf, -torch.inf):
        return "__builtin_inff()" if value > 0 else "-__builtin_inff()"
    return f"{float(value).hex()}f"


_INFIX = {
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "__rshift__": "{0} >> {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "scalar_tensor": "{0}",
}
"""Expressions that are the same in all three languages."""


CPP = Dialect(
    statement="const {type} {name} = {value};",
    types={torch.float32: "float", torch.int32: "int32_t", torch.bool: "bool"},
    number=_cpp_number,
    expressions=_INFIX
    | {
        "add": "add({0}, {1})",
        "sub": "sub({0}, {1})",
        "rsub": "sub({1}, {0})",
        "mul": "mul({0}, {1})",
        "div": "{0} / {1}",
        "reciprocal": "1.0f / {0}",
        "neg": "-{0}",
        "sqrt": "__builtin_sqrtf({0})",
        "fma": "__builtin_fmaf({0}, {1}, {2})",
        "maximum": "maximum({0}, {1})",
        "clamp_min": "({0} < {1} ? {1} : {0})",
        "clamp_max": "({0} > {1} ? {1} : {0})",
        "clamp": "({0} < {1} ? {1} : {0} > {2} ? {2} : {0})",
        "__lshift__": "shift_left({0}, {1})",
        "where": "{0} ? {1} : {2}",
        "bits_of": "bits_of({0})",
        "float_of": "float_of({0})",
    },
)
"""Uses the functions of `cpp.PRELUDE`, whose integers wrap as torch's do."""


LOOPS = Dialect(
    statement="const auto {name} = {value};",
    types={torch.float32: "", torch.int32: "", torch.bool: ""},
    number=lambda value, dtype: f"{'F' if dtype == torch.float32 else 'I'}({_cpp_number(value, dtype)})",
    expressions=_INFIX
    | {
        "add": "{0} + {1}",
        "sub": "{0} - {1}",
        "clamp_max": "least({0}, {1})",
        "__lshift__": "shift_left({0}, {1})",
        "where": "choose({0}, {1}, {2})",
        "bits_of": "bits_of({0})",
        "float_of": "float_of({0})",
    },
)
"""Uses the helpers of `loops`, whose ``F`` and ``I`` are single numbers or vectors of them."""


def _triton_number(value: float, dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return str(int(value))
    return repr(float(value)) if value - value == 0 else f'float("{float(value)}")'


TRITON = Dialect(
    statement="{name} = {value}",
    types={torch.float32: "", torch.int32: "", torch.bool: ""},
    number=_triton_number,
    expressions=_INFIX
    | {
        "add": "{0} + {1}",
        "sub": "{0} - {1}",
        "rsub": "{1} - {0}",
        "mul": "{0} * {1}",
        "div": "tl.div_rn({0}, {1})",
        "reciprocal": "tl.div_rn(1.0, {0})",
        "neg": "-{0}",
        "sqrt": "tl.sqrt_rn({0})",
        "fma": "fma({0}, {1}, {2})",
        "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
        "clamp_min": "tl.maximum({0}, {1})",
        "clamp_max": "tl.minimum({0}, {1})",
        "clamp": "tl.minimum(tl.maximum({0}, {1}), {2})",
        "__lshift__": "{0} << {1}",
        "where": "tl.where({0}, {1}, {2})",
        "bits_of": "({0}).to(tl.int32, bitcast=True)",
        "float_of": "({0}).to(tl.float32, bitcast=True)",
    },
)
"""Needs ``import triton.language as tl``; every value is int32, float32 or bool."""
