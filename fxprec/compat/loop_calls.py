"""Lower operators to one C++ function call inside Inductor's loops on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir, lowering, virtualized
from torch._inductor.codegen import cpp as _cpp

from fxprec.compat.patches import optional, replaced

LoopText = Callable[[str, str], str]
"""A function that returns a C++ function's text, given the C++ types of float32 and int32, scalar or vector."""

_texts: dict[str, LoopText] = {}
bytes_in_registers = optional("fxprec.compat.avx2", "bytes_in_registers", "loops over bytes for AVX2 are slower")


def call_in_loop(x: object, name: str, text: LoopText, dtype: torch.dtype) -> object:
    """Return the result, as ``dtype``, of calling the C++ function ``text`` on ``x`` in the body of a loop.

    ``name`` must identify ``text``. Inductor's operator for inline code is for GPUs; on a CPU `calls_in_loops` gives
    the operator its only meaning.
    """
    _texts[name] = text
    return virtualized.ops.inline_asm_elementwise(x, asm=name, constraints="", dtype=dtype, is_pure=True, pack=1)


def converted_in_loop(x: object, dtype: torch.dtype, source: torch.dtype) -> object:
    """Return ``x`` converted to another dtype in the body of a loop; between 8-bit dtypes it is a bitcast."""
    if dtype == source:
        return x
    if dtype.itemsize == source.itemsize == 1:
        return virtualized.ops.to_dtype_bitcast(x, dtype, source)
    return virtualized.ops.to_dtype(x, dtype, src_dtype=source)


def lower_pointwise(target: object, result: Callable[..., torch.dtype], element: Callable[..., object]) -> None:
    """Register a pointwise lowering with Inductor for an operator on a tensor and constants ``args``.

    ``result(*args)`` returns the dtype of the result. ``element(x, dtype, *args)`` returns an element of the result
    for an element ``x`` of the tensor, whose dtype is ``dtype``.
    """
    if target in lowering.lowerings:
        return

    def lower(x: ir.TensorBox, *args: object) -> ir.TensorBox:
        load, dtype = x.make_loader(), x.get_dtype()

        def inner(index: Sequence[sympy.Expr]) -> object:
            return element(load(index), dtype, *args)

        return ir.Pointwise.create(
            device=x.get_device(), dtype=result(*args), inner_fn=inner, ranges=list(x.get_size())
        )

    lowering.register_lowering(target, type_promotion_kind=None)(lower)


@contextlib.contextmanager
def calls_in_loops() -> Iterator[None]:
    """Patch Inductor's C++ code generation to emit the texts of `call_in_loop`."""

    def inline_asm_elementwise(x: Any, *, asm: str, **_: object) -> str:
        types = "float", "int32_t"
        if x.is_vec:
            types = tuple(virtualized.V.kernel._get_vec_type(dtype) for dtype in (torch.float32, torch.int32))
        return f"{_texts[asm](*types)}({x})"

    text = staticmethod(inline_asm_elementwise)
    with replaced(_cpp.CppOverrides, "inline_asm_elementwise", lambda _: text), bytes_in_registers():
        yield
