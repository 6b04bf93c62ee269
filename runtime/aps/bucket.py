"""Exchange one bucket by APS, in stages that are scheduled one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exchange import (
    all_gather,
    exchange_hierarchical,
    split_messages,
    sum_fp32,
    sum_in_format,
    to_owners,
)
from fxprec.runtime.aps.exponents import exponent_codes, factor_exponents, mask_factors
from fxprec.runtime.aps.layout import Layout, layout, sizes_of
from fxprec.runtime.aps.segments import indices_of, largest_magnitudes, scale_by_powers
from fxprec.runtime.aps.state import APSState


@dataclass
class Bucket:
    """Gradients of one DDP bucket, or of a part of it: layers that are coded, and layers that stay high."""

    index: int
    buffer: Tensor
    """(elements,), all of DDP's bucket; the result is written here."""
    low: list[Tensor]
    """Views of the layers that are coded."""
    high: list[Tensor]
    """Views of the layers that go as they are."""
    parameters: list[Tensor]
    """Parameters of `low`, in its order."""
    part: int = 0
    """Which part of DDP's bucket this is."""


PART_ELEMENTS = 1 << 20  # 25 M gradients at 200 Mbit/s: 1.84 s in parts of this size, 2.06 s in whole 25 MiB buckets


def split_bucket(
    state: APSState, index: int, buffer: Tensor, views: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Bucket]:
    """Sort a bucket's layers by whether they are coded, and cut the coded ones into parts of whole layers.

    Parts of a large bucket keep wire and cores busy at once; a schedule's high phase codes nothing.
    """
    high_phase = state.is_high(state.step)
    high: list[Tensor] = []
    parts = [Bucket(index, buffer, [], high, [])]
    for view, parameter in zip(views, parameters, strict=True):
        flat = view.reshape(-1) if view.is_contiguous() else view
        if high_phase or state.keeps_high(parameter):
            high.append(flat)
        elif flat.numel():
            if sum(sizes_of(parts[-1].low)) >= PART_ELEMENTS:
                parts.append(Bucket(index, buffer, [], [], [], part=len(parts)))
            parts[-1].low.append(flat)
            parts[-1].parameters.append(parameter)
    return parts


class Exchange:
    """The sum over ranks, divided by their number, of one bucket.

    `start`, then the `STAGES` in order, on every rank. Stages of different buckets may run at the same time, each
    stage in bucket order: those that communicate do so on a process group of their own.
    """

    STAGES = ("prepare", "scatter", "reduce", "gather", "finish")

    def __init__(self, state: APSState, bucket: Bucket) -> None:
        self.state = state
        self.bucket = bucket
        self.layout: Layout = layout(sizes_of(bucket.low), state.groups.size)
        self.work: dist.Work | None = None
        self.exponent_codes = torch.empty(0, dtype=torch.int8, device="cpu")
        self.exponents = torch.empty(0, dtype=torch.int32, device="cpu")
        self.flat = torch.empty(0, dtype=torch.float32, device="cpu")
        self.in_place = False
        self.lost: Tensor | None = None
        self.message = torch.empty(0, dtype=torch.uint8, device="cpu")
        """The codes that the next stage sends, or that the last one received."""

    def start(self) -> None:
        """Gather the coded layers as float32, and begin the exchange of their exponents."""
        if not self.bucket.low:
            return
        self.flat = self._flatten()
        self._add_residuals(self.layout.layers(self.flat))
        terms = 1 if self.state.options.accumulate == "fp32" else self.state.groups.size
        self.exponent_codes = exponent_codes(largest_magnitudes(self.flat, self.layout.bounds), terms)
        group = self.state.groups.exponents
        self.work = dist.all_reduce(self.exponent_codes, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def prepare(self) -> None:
        """Wait for the exponents; scale and encode."""
        if self.work is None:
            return
        self.work.wait()
        random = self.state.random(self.state.step, self.bucket.index, self.bucket.part, self.flat.device)
        self.coder = Coder(self.state.wire, random, bounded=self._aps)
        self.exponents = factor_exponents(self.exponent_codes, self.state.wire.top)
        if not self._aps:
            self.exponents = torch.zeros_like(self.exponents)
            self.flat /= self.state.groups.size if self._divides_first else 1
        feedback = self.state.options.error_feedback
        wanted = self.flat.clone() if feedback else self.flat
        self.message = self.coder.scale_and_encode(self.flat, self.layout.bounds, self.exponents)
        if feedback:
            mask = mask_factors(self.exponent_codes)
            self.lost = wanted - self.coder.decode_scaled(self.message, self.layout.bounds, -self.exponents, mask, 1)

    def scatter(self) -> None:
        """Send the codes to their owners, and layers that stay high on their own way."""
        groups = self.state.groups
        if self.bucket.high:
            self._reduce_high()
        if self.work is not None and groups.parts is None:
            self.message = to_owners(self.message, self.layout, self.state.wire.code_bytes, groups.payload)

    def reduce(self) -> None:
        """Sum what this rank owns; the hierarchical way is walked to its end here."""
        if self.work is None:
            return
        mode, groups = self.state.options.accumulate, self.state.groups
        if mode == "fp32":
            lost = None if self.lost is None else torch.zeros_like(self.lost)
            self.message = sum_fp32(self.message, self.coder, self.layout, groups.rank, lost)
            if self.lost is not None and lost is not None:
                scale_by_powers(lost, self.layout.bounds, -self.exponents)
                self.lost += lost
        elif groups.parts is None:
            self.message = sum_in_format(self.message, self.coder, groups.rank, kahan=mode == "kahan")
        else:
            self.message = exchange_hierarchical(self.message, self.coder, groups.parts, kahan=mode == "kahan")

    def gather(self) -> None:
        """Collect the codes of the sum from their owners."""
        if self.work is not None and self.state.groups.parts is None:
            self.message = all_gather(self.message, self.state.groups.gather)

    def finish(self) -> None:
        """Decode, unscale, divide by the number of ranks, and write into the bucket's buffer."""
        if self.work is None:
            return
        pieces, device = self.layout.pieces, self.exponents.device
        if self.state.options.accumulate == "fp32":
            codes, second = split_messages(self.message, self.layout)
        else:
            codes, second = self.message.reshape(-1), torch.zeros(len(pieces), dtype=torch.int32, device=device)
        layer_of = indices_of(self.layout.layer_of, device)
        exponents = -second - self.exponents[layer_of]
        mask = mask_factors(self.exponent_codes)[layer_of]
        bounds = [(p.start, p.end) for p in pieces]
        whole = self.flat if self.in_place else None
        coder = self.coder if self.state.options.accumulate == "fp32" else replace(self.coder, bounded=False)
        divisor = 1 if self._divides_first else self.state.groups.size
        mean = coder.decode_scaled(codes, bounds, exponents, mask, divisor, whole)
        if self.lost is not None:
            self._keep_residuals(self.lost)
        if whole is None:
            write_back(mean, self.bucket.low)

    @property
    def _aps(self) -> bool:
        return self.state.options.scaling == "aps"

    @property
    def _divides_first(self) -> bool:
        return self.state.options.scaling == "none"

    def _flatten(self) -> Tensor:
        """Return the coded layers, flat: in place in the buffer where they are float32 and lie one after another."""
        low = self.bucket.low
        first = low[0].storage_offset()
        expected = [first + start for start, _ in self.layout.bounds]
        plain = all(v.dtype == torch.float32 and v.dim() == 1 and v.is_contiguous() for v in low)
        self.in_place = plain and [v.storage_offset() for v in low] == expected
        if self.in_place:
            return low[0].as_strided((self.layout.total,), (1,))
        return torch.cat([v.reshape(-1).to(torch.float32) for v in low])

    def _reduce_high(self) -> None:
        high = self.bucket.high
        whole = sum(sizes_of(high)) == self.bucket.buffer.numel()
        flat = self.bucket.buffer if whole else torch.cat([v.reshape(-1) for v in high])
        dist.all_reduce(flat, group=self.state.groups.payload)
        flat.div_(self.state.groups.size)
        if not whole:
            write_back(flat, high)

    def _add_residuals(self, layers: list[Tensor]) -> None:
        for layer, parameter in zip(layers, self.bucket.parameters, strict=True):
            if parameter in self.state.residuals:
                layer += self.state.residuals[parameter]

    def _keep_residuals(self, lost: Tensor) -> None:
        layers = self.layout.layers(lost)
        for layer, parameter in zip(layers, self.bucket.parameters, strict=True):
            self.state.residuals[parameter] = torch.nan_to_num(layer, nan=0.0, posinf=0.0, neginf=0.0)


def write_back(flat: Tensor, views: Sequence[Tensor]) -> None:
    """Copy a flat tensor back into the views it was made of."""
    for part, view in zip(torch.split(flat, [v.numel() for v in views]), views, strict=True):
        view.copy_(part.view_as(view))
