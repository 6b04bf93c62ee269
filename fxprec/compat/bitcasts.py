"""How Inductor's C++ loops read a vector of numbers as one of integers, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.codegen import cpp as _cpp
from torch._inductor.virtualized import V


@contextlib.contextmanager
def vector_bitcasts() -> Iterator[None]:
    """Have C++ loops read the bits of a whole vector at once, as the codecs do several times an element.

    Inductor writes vectors out and reads element after element, in a loop that its own flags keep from being
    vectorized (torch 2.11 to 2.15).
    """
    overrides: Any = getattr(_cpp, "CppVecOverrides", None)
    one_by_one = vars(overrides).get("to_dtype_bitcast") if overrides is not None else None
    if one_by_one is None or not hasattr(_cpp.CppVecKernel, "_get_vec_type"):
        yield
        return

    def to_dtype_bitcast(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> Any:
        if x.dtype != src_dtype or dtype.itemsize != src_dtype.itemsize:
            return one_by_one.__func__(x, dtype, src_dtype)
        return f"c10::bit_cast<{V.kernel._get_vec_type(dtype)}>({x})"

    overrides.to_dtype_bitcast = staticmethod(to_dtype_bitcast)
    try:
        yield
    finally:
        overrides.to_dtype_bitcast = one_by_one
