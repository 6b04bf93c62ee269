"""Run the exchange's loops over CPU memory in C++, which Inductor's C++ builder compiles once and caches on disk.

Each loop has a plain torch form with the same bits in `exponents` and `wire`. Without a compiler the plain forms run,
with a warning.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from fxprec.errors import FormatError
from fxprec.numerics import native
from fxprec.numerics.blocks import BlockFormat
from fxprec.numerics.cpp import CFormat, c_format, with_codec
from fxprec.numerics.formats import Format
from fxprec.runtime.aps.codecs import Codec, thresholds

_CELLS = 1 << 15
_LARGEST_BLOCK = 4096
MAX_FACTOR_EXPONENT = 126  # 2^126 and 2^-126 are normal float32 numbers


_MEMORY, _COUNT, _FACTOR = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_CODING = (None, _MEMORY, _MEMORY, _COUNT, _FACTOR, _FACTOR)
_SIGNATURES = {
    "aps_largest": (ctypes.c_int32, _MEMORY, _COUNT),
    "aps_encode": (*_CODING, ctypes.POINTER(CFormat)),
    "aps_encode_table": (*_CODING, _MEMORY, _MEMORY, _MEMORY),
    "aps_sum": (None, _MEMORY, _COUNT, _COUNT, _MEMORY, _MEMORY),
    "aps_look_up": (None, _MEMORY, _COUNT, _MEMORY, _MEMORY),
    "aps_hadamard": (None, _MEMORY, _COUNT, _COUNT, _MEMORY, _MEMORY),
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; without a compiler, warn and return None."""
    source = with_codec(native.text_beside(__file__, "kernels.cpp"))
    return native.load_or_warn(source, _SIGNATURES, "APS runs op by op, several times slower")


def usable(*tensors: Tensor) -> bool:
    """Return whether the kernels can work on these tensors."""
    plain = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    return plain and library() is not None


def _call(name: str, *arguments: object) -> int:
    loaded = library()
    assert loaded is not None
    result: int = getattr(loaded, name)(*arguments)
    return result


def _floats(name: str, t: Tensor, numel: int) -> int:
    return native.address(name, t, torch.float32, numel)


def _codes(name: str, t: Tensor, numel: int) -> int:
    return native.address(name, t, torch.uint8, numel)


def largest_bits(x: Tensor) -> int:
    """Return the bits of the largest magnitude of a float32 tensor, above those of inf if the tensor has a NaN."""
    return _call("aps_largest", _floats("x", x, x.numel()), x.numel())


def _factors(exponent: int) -> tuple[float, float]:
    """Return two powers of two whose product is 2^exponent, each a normal float32."""
    first = max(-MAX_FACTOR_EXPONENT, min(MAX_FACTOR_EXPONENT, exponent))
    return 2.0**first, 2.0 ** (exponent - first)


def encode(x: Tensor, exponent: int, kind: Format | Codec | BlockFormat, out: Tensor) -> None:
    """Write codes (uint8) of x * 2^exponent, rounded to nearest, into `out`.

    Raises `FormatError` for a `kind` with codes above 8 bits.
    """
    n = x.numel()
    head = (_floats("x", x, n), _codes("out", out, n), n, *_factors(exponent))
    if isinstance(kind, Codec):
        below, above, borders = _cells(kind)
        tables = _codes("below", below, _CELLS), _codes("above", above, _CELLS), _floats("borders", borders, 128)
        _call("aps_encode_table", *head, *tables)
    else:
        if isinstance(kind, BlockFormat) or kind.bits > 8:
            raise FormatError(f"{kind.name} has {kind.bits} bits; this kernel writes codes of at most 8, a byte each")
        _call("aps_encode", *head, ctypes.byref(c_format(kind)))


def sum_rows(rows: Tensor, table: Tensor) -> Tensor:
    """Return the sum (n,) over rows, in order, of the values of codes (rows, n) in a table of 256 float32 values."""
    native.check_readable("rows", rows, dim=2)
    count, n = rows.shape
    total = torch.empty(n, dtype=torch.float32, device="cpu")
    codes, values = _codes("rows", rows, count * n), _floats("table", table, 256)
    _call("aps_sum", codes, count, n, values, _floats("total", total, n))
    return total


def look_up(codes: Tensor, table: Tensor, out: Tensor) -> None:
    """Write the values of codes (uint8) in a table of 256 float32 values into `out`."""
    n = codes.numel()
    _call("aps_look_up", _codes("codes", codes, n), n, _floats("table", table, 256), _floats("out", out, n))


def hadamard(x: Tensor, before: Tensor, after: Tensor) -> None:
    """Multiply each block of a float32 tensor in place by `before`, the Hadamard matrix, and `after`, both (block,).

    Raises `FormatError` if the elements are not whole blocks of a power of two of at most 4096.
    """
    n, block = x.numel(), before.numel()
    if n % block or block & (block - 1) or block > _LARGEST_BLOCK:
        raise FormatError(f"{n} elements are not in blocks of {block}, a power of two of at most {_LARGEST_BLOCK}")
    factors = _floats("before", before, block), _floats("after", after, block)
    _call("aps_hadamard", _floats("x", x, n), n, block, *factors)


@cache
def _cells(c: Codec) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes at the start and at the end of each cell of magnitudes with equal upper 15 bits, and borders."""
    borders = thresholds(c, torch.device("cpu"))
    start = torch.arange(_CELLS, dtype=torch.int32, device="cpu") << 16
    low, high = start.view(torch.float32), (start | 0xFFFF).view(torch.float32)
    below, above = torch.bucketize(low, borders), torch.bucketize(high, borders)
    # bucketize counts the borders below a value. A cell may contain only one border, perhaps repeated.
    inside = above > below
    same = borders[below[inside].clamp(max=126)] == borders[(above[inside] - 1).clamp(max=126)]
    assert bool(same.all()), f"two borders of {c.name} lie in one cell"
    padded = torch.cat([borders, borders.new_tensor([torch.inf])])
    return below.to(torch.uint8), above.to(torch.uint8), padded
