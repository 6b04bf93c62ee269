"""One bucket's way through APS, in the two halves that are scheduled apart: exponents, then payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.runtime.aps.exchange import Coder, exchange_fp32, exchange_in_format
from fxprec.runtime.aps.exponents import (
    exponent_codes,
    factor_exponents,
    largest_magnitudes,
    mask_factors,
    scale_by_powers,
)
from fxprec.runtime.aps.layout import Layout, layout, sizes_of
from fxprec.runtime.aps.state import APSState


@dataclass
class Bucket:
    """Gradients of one DDP bucket, split into layers that are coded and layers that stay high."""

    index: int
    buffer: Tensor
    """(elements,), all gradients; the result is written here."""
    low: list[Tensor]
    """Views of the layers that are coded."""
    high: list[Tensor]
    """Views of the layers that go as they are."""
    parameters: Sequence[Tensor]
    """Parameters of `low`, in its order."""


def split_bucket(
    state: APSState, index: int, buffer: Tensor, views: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Bucket:
    """Sort a bucket's layers by whether they are coded; a schedule's high phase codes none."""
    flat = [v.reshape(-1) if v.is_contiguous() else v for v in views]
    high_phase = state.in_high_phase
    low, high, coded = [], [], []
    for view, parameter in zip(flat, parameters, strict=True):
        if high_phase or state.keeps_high(parameter):
            high.append(view)
        elif view.numel():
            low.append(view)
            coded.append(parameter)
    return Bucket(index, buffer, low, high, coded)


class Exchange:
    """The sum over ranks, divided by their number, of one bucket. `start`, then `finish`, on every rank."""

    def __init__(self, state: APSState, bucket: Bucket) -> None:
        self.state = state
        self.bucket = bucket
        self.work: dist.Work | None = None
        self.codes = torch.empty(0, dtype=torch.int8)
        self.flat = torch.empty(0)

    def start(self) -> None:
        """Gather the coded layers as float32, and begin the exchange of their exponents."""
        low = self.bucket.low
        if not low:
            return
        self.flat = self._flatten()
        layers = self._layout.layers(self.flat)
        self._add_residuals(layers)
        terms = 1 if self.state.options.accumulate == "fp32" else self.state.groups.size
        self.codes = exponent_codes(largest_magnitudes(layers), terms)
        self.work = dist.all_reduce(self.codes, op=dist.ReduceOp.MAX, group=self.state.groups.exponents, async_op=True)

    def finish(self) -> Tensor:
        """Exchange the payload, write the mean into the bucket's buffer, and return it."""
        if self.bucket.high:
            self._reduce_high()
        if self.work is not None:
            self.work.wait()
            self._reduce_low()
        return self.bucket.buffer

    @property
    def _layout(self) -> Layout:
        return layout(sizes_of(self.bucket.low), self.state.groups.size)

    def _flatten(self) -> Tensor:
        """The coded layers, flat: the buffer itself where it is float32 and all of it is coded."""
        buffer = self.bucket.buffer
        if not self.bucket.high and buffer.dtype == torch.float32 and buffer.numel() == self._layout.total:
            return buffer
        return torch.cat([v.reshape(-1).to(torch.float32) for v in self.bucket.low])

    def _reduce_high(self) -> None:
        high = self.bucket.high
        whole = not self.bucket.low
        flat = self.bucket.buffer if whole else torch.cat([v.reshape(-1) for v in high])
        dist.all_reduce(flat, group=self.state.groups.payload)
        flat.div_(self.state.groups.size)
        if not whole:
            _write(flat, high)

    def _reduce_low(self) -> None:
        aps = self.state.options.scaling == "aps"
        exponents = factor_exponents(self.codes, self.state.wire.top)
        if not aps:
            exponents = torch.zeros_like(exponents)
        lay = self._layout
        scale_by_powers(lay.layers(self.flat), exponents)
        coder = self._coder(bounded=aps)
        sent = coder.encode(self.flat)
        lost = self.flat - coder.decode(sent) if self.state.options.error_feedback else None
        total = self._sum(sent, coder, lay, lost)
        if lost is not None:
            self._keep_residuals(lost, exponents)
        scale_by_powers(lay.layers(total), -exponents, mask_factors(self.codes))
        total.div_(self.state.groups.size)
        _write(total, self.bucket.low)

    def _sum(self, sent: Tensor, coder: Coder, lay: Layout, lost: Tensor | None) -> Tensor:
        mode = self.state.options.accumulate
        if mode == "fp32":
            return exchange_fp32(sent, coder, lay, self.state.groups, lost)
        return exchange_in_format(sent, coder, lay, self.state.groups, kahan=mode == "kahan")

    def _coder(self, bounded: bool) -> Coder:
        return Coder(self.state.wire, self.state.random(self.bucket.index, self.flat.device), bounded)

    def _add_residuals(self, layers: list[Tensor]) -> None:
        for layer, parameter in zip(layers, self.bucket.parameters, strict=True):
            if parameter in self.state.residuals:
                layer += self.state.residuals[parameter]

    def _keep_residuals(self, lost: Tensor, exponents: Tensor) -> None:
        layers = self._layout.layers(lost)
        scale_by_powers(layers, -exponents)
        for layer, parameter in zip(layers, self.bucket.parameters, strict=True):
            self.state.residuals[parameter] = torch.nan_to_num(layer, nan=0.0, posinf=0.0, neginf=0.0)


def _write(flat: Tensor, views: Sequence[Tensor]) -> None:
    """Copy a flat tensor back into the views it was made of."""
    for part, view in zip(torch.split(flat, [v.numel() for v in views]), views, strict=True):
        view.copy_(part.view_as(view))
