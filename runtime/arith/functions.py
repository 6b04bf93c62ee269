"""Compute `matmul`, `dot` and `sum` with every product and every partial sum rounded."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fxprec.errors import FormatError
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.rounding import quantize
from fxprec.runtime.arith import cpu, reference
from fxprec.runtime.arith.spec import Spec

Method: TypeAlias = Literal["auto", "reference"]


def matmul(
    a: Tensor,
    b: Tensor,
    fmt: Format | str,
    accumulate: Format | str | None = None,
    kahan: bool = False,
    *,
    chunk: int | None = None,
    method: Method = "auto",
) -> Tensor:
    """Return a (..., m, k) times b (..., k, n) as float32 (..., m, n); leading dimensions broadcast.

    Inputs and products are rounded to ``fmt``. Partial sums, in increasing k, are rounded to ``accumulate`` (a format
    or its name, also ``"fp32"``; None is ``fmt``). ``kahan`` carries a compensation in the accumulator's format.
    ``chunk`` sums that many products at a time, then the sums (Wang et al. 2018). Each exact result is rounded once, to
    nearest even, with the format's own overflow rule. ``method="reference"`` runs the plain loop. Not differentiable;
    the inputs stay unchanged. Source: Han et al. 2020, section 5.

    Raises `FormatError` for an unknown format or one with 22 mantissa bits, for shapes that do not multiply, and for
    dtypes other than float32, bfloat16 and float16.
    """
    product = parse(fmt)
    spec = Spec(product, product if accumulate is None else parse(accumulate), bool(kahan), _chunk(chunk))
    if method not in ("auto", "reference"):
        raise FormatError(f"method={method!r} is unknown; use 'auto' or 'reference'")
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise FormatError(
            f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply: give (..., m, k) and (..., k, n); for "
            "vectors use fxprec.arith.dot"
        )
    with torch.no_grad():
        a, b = (quantize(_wide(t), product) for t in (a, b))
        return multiply(a, b, spec, method)


def multiply(a: Tensor, b: Tensor, spec: Spec, method: Method = "auto") -> Tensor:
    """Multiply as `matmul` does, for float32 numbers that are already rounded to ``spec.fmt``."""
    if a.dim() == b.dim() == 2:
        return _multiply(a, b, spec, method)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    lefts = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    rights = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    pairs = zip(lefts, rights, strict=True)
    parts = [_multiply(left, right, spec, method) for left, right in pairs]
    shape = (*batch, a.shape[-2], b.shape[-1])
    return torch.stack(parts).view(shape) if parts else a.new_zeros(shape)


def dot(
    a: Tensor,
    b: Tensor,
    fmt: Format | str,
    accumulate: Format | str | None = None,
    kahan: bool = False,
    *,
    chunk: int | None = None,
    method: Method = "auto",
) -> Tensor:
    """Return the dot product of two vectors (k,) as a float32 scalar.

    Options are those of `matmul`. Raises `FormatError`, also for other shapes, and what `matmul` raises.
    """
    if a.dim() != 1 or a.shape != b.shape:
        raise FormatError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} have no dot product: give two of (k,)")
    return matmul(a[None], b[:, None], fmt, accumulate, kahan, chunk=chunk, method=method)[0, 0]


def sum(
    x: Tensor,
    fmt: Format | str,
    accumulate: Format | str | None = None,
    kahan: bool = False,
    *,
    dim: int = -1,
    chunk: int | None = None,
    method: Method = "auto",
) -> Tensor:
    """Return the sum of ``x`` over ``dim`` as float32, elements rounded to ``fmt``, in increasing index.

    The result has the shape of ``x`` without ``dim``. Options are those of `matmul`. Raises `FormatError` for a scalar,
    and what `matmul` raises.
    """
    if x.dim() == 0:
        raise FormatError("a scalar has no dimension to sum over; give at least a vector (k,)")
    columns = x.movedim(dim, 0)
    ones = torch.ones(1, columns.shape[0], dtype=torch.float32, device=x.device)  # products with 1 are exact
    flat = columns.reshape(columns.shape[0], -1)
    found = matmul(ones, flat, fmt, accumulate, kahan, chunk=chunk, method=method)
    return found.view(columns.shape[1:])


def _wide(t: Tensor) -> Tensor:
    """Return 16-bit inputs as float32 and others unchanged; `quantize` refuses other dtypes."""
    return t.detach().float() if t.dtype in (torch.bfloat16, torch.float16) else t.detach()


def _chunk(chunk: int | None) -> int:
    if chunk is None:
        return 0
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise FormatError(f"chunk is {chunk!r}; give it a number of products of at least 1, or None")
    return chunk


def _multiply(a: Tensor, b: Tensor, spec: Spec, method: Method) -> Tensor:
    if method == "auto" and a.device.type == "cpu":
        found = cpu.matmul(a, b, spec)
        if found is not None:
            return found
    if method == "auto" and a.device.type == "cuda":
        from fxprec.runtime.arith import triton_kernel

        return triton_kernel.matmul(a, b, spec)
    return reference.matmul(a, b, spec)
