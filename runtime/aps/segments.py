"""Find the largest magnitudes of layers side by side in a flat tensor, and multiply the layers by powers of two.

On a GPU each of the two is one launch for all layers. The layers' positions are uploaded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fxprec.runtime import on_device
from fxprec.runtime.aps import exponents as by_layer
from fxprec.runtime.aps.exponents import BLOCK

Bounds = Sequence[tuple[int, int]]
"""(start, end) of pieces of a flat tensor in elements, in order; a piece may be empty."""


def _on_gpu(flat: Tensor) -> bool:
    return flat.is_cuda


def slices(flat: Tensor, bounds: Bounds) -> list[Tensor]:
    """Return views of the pieces."""
    return [flat[start:end] for start, end in bounds]


def largest_magnitudes(flat: Tensor, bounds: Bounds) -> Tensor:
    """Return the largest magnitude of each piece, float32 (pieces,); 0 for an empty piece, NaN for one with a NaN."""
    if not bounds:
        return torch.zeros(0, dtype=torch.float32, device=flat.device)
    if not _on_gpu(flat):
        return by_layer.largest_magnitudes(slices(flat, bounds))
    from fxprec.runtime.aps import segments_triton

    return segments_triton.largest_magnitudes(flat, *table_of(tuple(bounds), flat.device))


def scale_by_powers(flat: Tensor, bounds: Bounds, exponents: Tensor, mask: Tensor | None = None) -> None:
    """Multiply each piece of a float32 tensor in place, as `exponents.scale_by_powers` does."""
    if not bounds:
        return
    if not _on_gpu(flat):
        by_layer.scale_by_powers(slices(flat, bounds), exponents, mask)
        return
    from fxprec.runtime.aps import segments_triton

    segments_triton.scale_by_powers(flat, *table_of(tuple(bounds), flat.device), exponents, mask)


@lru_cache(maxsize=1024)
def table_of(bounds: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, int]:
    """Return first program, start and end of each piece, int64 (pieces, 3) on a device, and the number of programs."""
    first, rows = 0, []
    for start, end in bounds:
        rows.append((first, start, end))
        first += -(-(end - start) // BLOCK)
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), 3)
    return on_device.uploaded_for_good(table, device), first


@lru_cache(maxsize=1024)
def indices_of(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as int64 on a device, uploaded once."""
    return on_device.uploaded_for_good(torch.tensor(values, dtype=torch.int64, device="cpu"), device)
