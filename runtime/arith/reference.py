"""Multiply by the plain reference: one loop over k, in which every operation is exact and then rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics.codec import nearest
from fxprec.numerics.formats import FP32, Format
from fxprec.numerics.rows import format_row
from fxprec.runtime.arith.spec import Spec


def matmul(a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """Multiply (m, k) by (k, n), float32 numbers of ``spec.fmt``; return numbers of ``spec.accumulate`` (m, n)."""
    total = _Sum(a.new_zeros(a.shape[0], b.shape[1]), spec)
    depth = a.shape[1]
    chunk = spec.chunk or max(1, depth)
    for start in range(0, depth, chunk):
        part = _Sum(torch.zeros_like(total.value), spec)
        for k in range(start, min(start + chunk, depth)):
            part.add(product(a[:, k, None], b[None, k, :], spec))
        if spec.chunk:
            total.add(part.value)
        else:
            total = part
    return total.value


class _Sum:
    """A running sum in the accumulator's format, with Kahan's compensation if the spec has it."""

    def __init__(self, zero: Tensor, spec: Spec) -> None:
        self.value, self.spec = zero, spec
        self.lost = zero

    def add(self, p: Tensor) -> None:
        """Add p to s; with Kahan y = p - c, t = s + y, c = (t - s) - y, each rounded."""
        if not self.spec.kahan:
            self.value = self._plus(self.value, p)
            return
        y = self._plus(p, -self.lost)
        t = self._plus(self.value, y)
        self.lost = self._plus(self._plus(t, -self.value), -y)
        self.value = t

    def _plus(self, a: Tensor, b: Tensor) -> Tensor:
        if self.spec.accumulate == FP32:
            return a + b
        return rounded(sum_to_odd(a, b) if self.spec.odd_sum else a + b, self.spec.accumulate)


def rounded(x: Tensor, fmt: Format) -> Tensor:
    """Round float32 to nearest even, with the format's own overflow rule."""
    return x if fmt == FP32 else nearest(x, format_row(fmt))


def product(a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """Return the product rounded to ``spec.fmt``."""
    return rounded(product_to_odd(a, b) if spec.odd_product else a * b, spec.fmt)


def product_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 product, rounded to odd; float64 represents the exact product."""
    exact = a.double() * b.double()
    near = exact.float()
    # Beyond float32's range the format saturates or becomes inf in any case.
    return _to_odd(near, exact - near.double())


def sum_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 sum, rounded to odd. Source: Knuth's TwoSum; Boldo and Melquiond 2008."""
    total = a + b
    virtual = total - a
    return _to_odd(total, (a - (total - virtual)) + (b - virtual))


def _to_odd(near: Tensor, error: Tensor) -> Tensor:
    """Round to odd: replace an inexact result with an even last bit by its neighbour on the error's side."""
    bits = near.view(torch.int32)
    away = (error > 0) == (bits >= 0)
    step = torch.where(away, 1, -1)
    # An underflow to zero leaves its sign in the error.
    step = torch.where((bits & 0x7FFFFFFF) == 0, 1, step)
    bits = torch.where((bits & 0x7FFFFFFF) == 0, torch.where(error < 0, -(1 << 31), 0), bits)
    inexact = (error != 0) & ((bits & 1) == 0) & torch.isfinite(near) & ~torch.isnan(error)
    return torch.where(inexact, bits + step, near.view(torch.int32)).to(torch.int32).view(torch.float32)
