"""Run Triton kernels over pieces of a flat tensor: find each piece's largest magnitude, scale it by a power of two.

A program works on `BLOCK` elements of one piece, which it finds by binary search over the first programs of the pieces.
`fxprec.runtime.aps.segments` defines the bits that the kernels return.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxprec.numerics import ahead
from fxprec.runtime import on_device
from fxprec.runtime.aps.kernels import MAX_FACTOR_EXPONENT

BLOCK = 1024
"""Elements per program."""


@triton.jit
def _piece_of(table_ptr: tl.tensor, pieces: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    """Return the last piece whose first program does not come after this program."""
    piece = tl.program_id(0) * 0
    for i in tl.static_range(STEPS):
        later = piece + (1 << (STEPS - 1 - i))
        first = tl.load(table_ptr + later * 3, mask=later < pieces, other=1 << 40)
        piece = tl.where(first <= tl.program_id(0), later, piece)
    return piece


@triton.jit
def _largest_kernel(
    x_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pieces: tl.tensor,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    piece = _piece_of(table_ptr, pieces, STEPS)
    row = table_ptr + piece * 3
    at = tl.load(row + 1) + (tl.program_id(0) - tl.load(row)) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < tl.load(row + 2), other=0.0)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of magnitudes, NaN above inf
    tl.atomic_max(out_ptr + piece, tl.max(bits, 0), sem="relaxed")


@triton.jit
def _scale_kernel(
    x_ptr: tl.tensor,
    table_ptr: tl.tensor,
    exponents_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    pieces: tl.tensor,
    MASKED: tl.constexpr,
    LIMIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    piece = _piece_of(table_ptr, pieces, STEPS)
    row = table_ptr + piece * 3
    at = tl.load(row + 1) + (tl.program_id(0) - tl.load(row)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(row + 2)
    exponent = tl.load(exponents_ptr + piece)
    first = tl.minimum(tl.maximum(exponent, -LIMIT), LIMIT)
    factor = ((first + 127) << 23).to(tl.float32, bitcast=True)
    if MASKED:
        factor = factor * tl.load(mask_ptr + piece)
    second = ((exponent - first + 127) << 23).to(tl.float32, bitcast=True)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(x_ptr + at, x * factor * second, mask=inside)


def _steps(pieces: int) -> int:
    return max(1, (pieces - 1).bit_length())


def largest_magnitudes(flat: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Return the largest magnitude of each piece, float32 (pieces,)."""
    table, programs = table_of(tuple(bounds), flat.device)
    pieces = len(table)
    found = torch.zeros(pieces, dtype=torch.int32, device=flat.device)
    if programs:
        with on_device.current(flat.device):
            _largest_kernel[(programs,)](flat, table, found, pieces, STEPS=_steps(pieces), BLOCK=BLOCK)
    return found.view(torch.float32)


def scale_by_powers(
    flat: Tensor, bounds: Sequence[tuple[int, int]], exponents: Tensor, mask: Tensor | None = None
) -> None:
    """Multiply each piece in place by 2^exponent (int32) and by ``mask`` (float32), each (pieces,)."""
    table, programs = table_of(tuple(bounds), flat.device)
    if not programs:
        return
    pieces, options = len(table), {"LIMIT": MAX_FACTOR_EXPONENT, "MASKED": mask is not None, "BLOCK": BLOCK}
    given = exponents.to(torch.int32).contiguous()
    spare = given if mask is None else mask.contiguous()  # never read without a mask
    with on_device.current(flat.device):
        _scale_kernel[(programs,)](flat, table, given, spare, pieces, STEPS=_steps(pieces), **options)


@lru_cache(maxsize=1024)
def table_of(bounds: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, int]:
    """Return first program, start and end of each piece, int64 (pieces, 3), and the number of programs.

    The table is uploaded once.
    """
    first, rows = 0, []
    for start, end in bounds:
        rows.append((first, start, end))
        first += -(-(end - start) // BLOCK)
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), 3)
    return on_device.uploaded_for_good(table, device), first


def compile_to_ptx(arch: int) -> tuple[str, str]:
    """Return PTX of both kernels for an NVIDIA architecture (80, 89, 90, 100), without a GPU."""
    shared: dict[str, Any] = {"STEPS": 9, "BLOCK": BLOCK}
    kinds = {"x_ptr": "*fp32", "table_ptr": "*i64", "out_ptr": "*i32", "pieces": "i32"}
    largest = ahead.compile_for(_largest_kernel, kinds, shared, arch)
    kinds = {"x_ptr": "*fp32", "table_ptr": "*i64", "exponents_ptr": "*i32", "mask_ptr": "*fp32", "pieces": "i32"}
    scaled = ahead.compile_for(_scale_kernel, kinds, shared | {"MASKED": True, "LIMIT": MAX_FACTOR_EXPONENT}, arch)
    return str(largest.asm["ptx"]), str(scaled.asm["ptx"])
