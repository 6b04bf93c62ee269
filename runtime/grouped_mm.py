"""Implement grouped matrix products (`fxprec.ir.grouped`): torch's kernel on a GPU, else one product per group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fxprec import compat
from fxprec.ir.grouped import GroupedMm, PaddedEnds, PadGroups, padded_rows

_BYTES = 16
"""Alignment in bytes that torch's GPU kernel requires of each row."""


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return one product for each group of tokens; rows or columns beyond the last group are zero."""
    if _has_kernel(a) and _has_kernel(b):
        return _by_kernel(a, b, offs)
    groups = list(groups_of(offs))
    if a.ndim == b.ndim:
        out = a.new_zeros((len(groups), a.shape[0], b.shape[1]))
        for i, tokens in enumerate(groups):
            out[i] = _product(a[:, tokens], b[tokens])
        return out
    if a.ndim == 2:
        out = a.new_zeros((a.shape[0], b.shape[2]))
        for i, tokens in enumerate(groups):
            out[tokens] = _product(a[tokens], b[i])
        return out
    out = a.new_zeros((a.shape[1], b.shape[1]))
    for i, tokens in enumerate(groups):
        out[:, tokens] = _product(a[i], b[:, tokens])
    return out


def groups_of(offs: Tensor) -> Iterator[slice]:
    """Yield the tokens of each group. On a GPU this waits for ``offs``."""
    start = 0
    for end in offs.tolist():
        yield slice(start, end)
        start = end


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product. A CPU without 16-bit matrix instructions multiplies in float32 and rounds once."""
    if a.device.type == "cpu" and a.dtype.itemsize == 2 and not compat.has_cpu_gemm(a.dtype):
        return torch.mm(a.float(), b.float()).to(a.dtype)
    return torch.mm(a, b)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and is_aligned(x)


def is_aligned(x: Tensor) -> bool:
    """Return whether torch's kernel reads a tensor without a copy: rows or columns start at multiples of 16 bytes."""
    rows, columns = x.stride()[-2:]
    inner, outer, size = (columns, rows, x.shape[-1]) if columns == 1 else (rows, columns, x.shape[-2])
    return inner == 1 and outer >= size and outer * x.itemsize % _BYTES == 0


def _by_kernel(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    out = compat.grouped_mm(a, b, offs.int())
    if a.ndim == b.ndim:
        return out
    return zeroed_beyond(out, offs, a.ndim - 2)


def zeroed_beyond(out: Tensor, offs: Tensor, dim: int) -> Tensor:
    """Write 0 to a product's (.., ..) tokens beyond the last group, which lie along dimension ``dim``; return it."""
    beyond = torch.arange(out.shape[dim], device=out.device) >= offs[-1]
    return out.masked_fill_(beyond if dim else beyond[:, None], 0)


def padded_ends(offs: Tensor, unit: int) -> Tensor:
    """Return the ends of the groups with sizes rounded up to multiples of ``unit``, in the dtype of ``offs``."""
    return _sizes(offs, unit).cumsum(0).to(offs.dtype)


def _sizes(offs: Tensor, unit: int) -> Tensor:
    sizes = offs.diff(prepend=offs.new_zeros(1))
    return (sizes + unit - 1) // unit * unit


def pad_groups(x: Tensor, offs: Tensor, unit: int) -> Tensor:
    """Return the rows of ``x`` (T, K) with zeros after each group, so that groups begin at multiples of ``unit``."""
    made = padded_rows(x.shape[0], offs.shape[0], unit)
    if not x.numel() or not offs.numel():
        return x.new_zeros((made, x.shape[1]))
    offs = offs.long()
    sizes = _sizes(offs, unit)
    ends = sizes.cumsum(0)
    rows = torch.arange(made, device=x.device)
    group = torch.searchsorted(ends, rows, right=True).clamp_(max=offs.shape[0] - 1)
    begins = torch.cat([offs.new_zeros(1), offs[:-1]])
    source = rows - (ends - sizes)[group] + begins[group]
    is_token = source < offs[group]
    return torch.where(is_token[:, None], x[source.clamp_(max=x.shape[0] - 1)], 0)


GroupedMm.implement(grouped_mm)
PadGroups.implement(pad_groups)
PaddedEnds.implement(padded_ends)
