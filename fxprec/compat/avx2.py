"""Load and convert bytes in registers in Inductor's loops for AVX2, where ATen's vectors go through memory.

A loop over float32 handles 8 elements at once, but a vector of bytes has 32. ``loadu`` writes the 8 elements into an
array of 32 and then reads the whole array, which stalls until the writes are complete. This took longer than all
arithmetic of a norm's backward. Loading 8 of 16 16-bit numbers has the same problem. Converting int32 to bytes moves
every element by itself. ATen's vectors for AVX-512 do not do this.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.codegen import cpp as _cpp
from torch._inductor.cpu_vec_isa import VecAVX2


@contextlib.contextmanager
def bytes_in_registers() -> Iterator[None]:
    """Patch Inductor's C++ for AVX2 to load 8 elements of 1 or 2 bytes, and convert int32 to bytes, in registers."""
    kernel: Any = _cpp.CppVecKernel
    load, convert = kernel._get_vec_load_line, kernel.get_to_dtype_expr

    def get_vec_load_line(self: _cpp.CppVecKernel, *args: object, **kwargs: object) -> str:
        line = load(self, *args, **kwargs)
        found = _LOAD.fullmatch(str(line)) if isinstance(self.vec_isa, VecAVX2) else None
        return line if found is None else _loaded(*found.groups())

    def get_to_dtype_expr(
        self: Any, src: Any, dtype: torch.dtype, src_dtype: torch.dtype, *args: object, **kwargs: object
    ) -> object:
        if src_dtype == torch.int32 and dtype == torch.uint8 and src.is_vec and isinstance(self.vec_isa, VecAVX2):
            ints, narrow = self._get_vec_type(src_dtype), self._get_vec_type(dtype)
            if ints == _INTS:
                return f"[]({ints} x) {{ {_NARROW} return {narrow}(_mm256_castsi128_si256(bytes)); }}({src})"
        return convert(self, src, dtype, src_dtype, *args, **kwargs)

    kernel._get_vec_load_line, kernel.get_to_dtype_expr = get_vec_load_line, get_to_dtype_expr
    try:
        yield
    finally:
        kernel._get_vec_load_line, kernel.get_to_dtype_expr = load, convert


_LOAD = re.compile(
    r"(at::vec::Vectorized<(uint8_t|at::Float8_\w+|at::BFloat16|at::Half)>)::loadu\((.*), static_cast<int64_t>\(8L?\)\)"
)
_INTS = "at::vec::Vectorized<int32_t>"
_LOWEST = "0, 4, 8, 12" + 12 * ", -1"  # the lowest byte of each of four int32
_NARROW = (
    f"const __m256i fours = _mm256_shuffle_epi8(x, _mm256_setr_epi8({_LOWEST}, {_LOWEST}));"
    " const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));"
)


def _loaded(vector: str, element: str, place: str) -> str:
    """Return C++ that loads 8 elements and leaves the other lanes undefined; Inductor sets them to 1 for divisions."""
    low = f"_mm_{'loadu_si128' if element in _TWO_BYTES else 'loadl_epi64'}(static_cast<const __m128i*>(p))"
    return (
        f"[](const void* p) {{ {vector} v; const __m256i all = _mm256_castsi128_si256({low});"
        f" std::memcpy(&v, &all, sizeof v); return v; }}({place})"
    )


_TWO_BYTES = frozenset({"at::BFloat16", "at::Half"})
