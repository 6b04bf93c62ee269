"""Make Inductor's bitcasts between dtypes fast on CPUs; the codecs use several per element."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir, lowering, virtualized
from torch._inductor.codegen import cpp as _cpp


@contextlib.contextmanager
def bitcasts_in_loops() -> Iterator[None]:
    """Patch Inductor to bitcast whole vectors inside of its loops on a CPU, without writing the tensor to memory first.

    Unpatched (torch 2.11 to 2.15) Inductor stores a vector and bitcasts element by element, in a loop that its own
    flags keep from being vectorized. For a result that is a bitcast of another tensor, Inductor also writes that tensor
    to memory, contiguous, and then copies it to the required layout.
    """
    with contextlib.ExitStack() as patches:
        patches.enter_context(_of_vectors())
        patches.enter_context(_of_values())
        yield


@contextlib.contextmanager
def _of_vectors() -> Iterator[None]:
    overrides: Any = getattr(_cpp, "CppVecOverrides", None)
    one_by_one = None if overrides is None else vars(overrides).get("to_dtype_bitcast")
    if one_by_one is None or not hasattr(_cpp.CppVecKernel, "_get_vec_type"):
        yield
        return

    def to_dtype_bitcast(x: Any, dtype: torch.dtype, src_dtype: torch.dtype, *args: object, **kwargs: object) -> object:
        if args or kwargs or x.dtype != src_dtype or dtype.itemsize != src_dtype.itemsize:
            return one_by_one.__func__(x, dtype, src_dtype, *args, **kwargs)
        # not std::bit_cast: it needs C++20, and Inductor's code before torch 2.12 is older C++
        vector = virtualized.V.kernel._get_vec_type(dtype)
        return f"[&] {{ {vector} bits; std::memcpy(&bits, &{x}, sizeof bits); return bits; }}()"

    overrides.to_dtype_bitcast = staticmethod(to_dtype_bitcast)
    try:
        yield
    finally:
        overrides.to_dtype_bitcast = one_by_one


@contextlib.contextmanager
def _of_values() -> Iterator[None]:
    of_storage: Callable[..., ir.TensorBox] = lowering.lowerings[_VIEW]

    def view(x: ir.TensorBox, dtype: torch.dtype, *args: object, **kwargs: object) -> ir.TensorBox:
        source = x.get_dtype()
        as_wide = dtype != source and dtype.itemsize == source.itemsize and not (dtype.is_complex or source.is_complex)
        if args or kwargs or not as_wide or x.get_device_or_error().type != "cpu" or ir.is_storage_and_layout(x):
            return of_storage(x, dtype, *args, **kwargs)
        load = x.make_loader()

        def bits(index: Sequence[sympy.Expr]) -> Any:
            return virtualized.ops.to_dtype_bitcast(load(index), dtype, source)

        return ir.Pointwise.create(device=x.get_device(), dtype=dtype, inner_fn=bits, ranges=list(x.get_size()))

    lowering.lowerings[_VIEW] = view
    try:
        yield
    finally:
        lowering.lowerings[_VIEW] = of_storage


_VIEW = torch.ops.aten.view.dtype
