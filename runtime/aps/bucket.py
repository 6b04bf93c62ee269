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
    set_mean,
    split_messages,
    sum_fp32,
    sum_in_format,
    to_owners,
    write_back,
)
from fxprec.runtime.aps.exponents import exponent_codes, factor_exponents, mask_factors
from fxprec.runtime.aps.groups import Groups
from fxprec.runtime.aps.layout import Layout, layout, sizes_of
from fxprec.runtime.aps.rotation import rotate, rotate_back
from fxprec.runtime.aps.segments import indices_of, largest_magnitudes, scale_by_powers
from fxprec.runtime.aps.state import APSState
from fxprec.runtime.aps.wire import Wire, num_bytes


@dataclass
class Bucket:
    """Gradients of one DDP bucket, or of a part of it: layers that are coded alike, and layers that are not coded."""

    index: int
    buffer: Tensor
    """(elements,), all of DDP's bucket; the result is written here."""
    low: list[Tensor]
    """Views of the layers that are coded."""
    plain: dict[torch.dtype, list[Tensor]]
    """Views of the layers that are added on the way, by the dtype in which they are."""
    parameters: list[Tensor]
    """Parameters of `low`, in its order."""
    wire: Wire
    """How `low` is coded."""
    part: int = 0
    """Which part of DDP's bucket this is."""


PART_ELEMENTS = 1 << 20  # 25 M gradients at 200 Mbit/s: 1.84 s in parts of this size, 2.06 s in whole 25 MiB buckets


def split_bucket(
    state: APSState, index: int, buffer: Tensor, views: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Bucket]:
    """Sort a bucket's layers by how they are sent, and cut those coded alike into parts of whole layers.

    Parts of a large bucket keep wire and cores busy at once; a schedule's high phase codes nothing.
    """
    parts: list[Bucket] = []
    last: dict[Wire, Bucket] = {}
    plain: dict[torch.dtype, list[Tensor]] = {}
    for view, parameter in zip(views, parameters, strict=True):
        flat = view.reshape(-1) if view.is_contiguous() else view
        coding = state.coding_for(parameter)
        if coding is None or isinstance(coding, torch.dtype):
            settle(state, parameter, view)
            plain.setdefault(coding or view.dtype, []).append(flat)
        elif flat.numel():
            if coding not in last or sum(sizes_of(last[coding].low)) >= PART_ELEMENTS:
                last[coding] = Bucket(index, buffer, [], {}, [], coding, part=len(parts))
                parts.append(last[coding])
            last[coding].low.append(flat)
            last[coding].parameters.append(parameter)
    if not parts:
        parts.append(Bucket(index, buffer, [], {}, [], state.wire))
    parts[0].plain = plain
    return parts


def settle(state: APSState, parameter: Tensor, view: Tensor) -> None:
    """Add to a gradient that is not coded what earlier codes lost of its layer, which is owed no longer."""
    if parameter in state.residuals:
        view += state.residuals.pop(parameter).view_as(view)


def reduce_plain(bucket: Bucket, groups: Groups) -> None:
    """Average the layers that are not coded, by one all-reduce for each dtype."""
    for dtype, views in bucket.plain.items():
        whole = sum(sizes_of(views)) == bucket.buffer.numel()
        flat = bucket.buffer if whole else torch.cat([v.reshape(-1) for v in views])
        total = flat.to(dtype)
        dist.all_reduce(total, group=groups.payload)
        set_mean(flat, total, groups.size)
        if not whole:
            write_back(flat, views)


class Exchange:
    """The sum over ranks, divided by their number, of one bucket.

    `start`, then the `STAGES` in order, on every rank. Stages of different buckets may run at the same time, each
    stage in bucket order: those that communicate do so on a process group of their own. `groups` are the state's, or
    those between nodes.
    """

    STAGES: tuple[str, ...] = ("prepare", "scatter", "reduce", "gather", "finish")

    def __init__(self, state: APSState, bucket: Bucket, groups: Groups | None = None) -> None:
        self.state = state
        self.groups = groups or state.groups
        self.bucket = bucket
        self.wire = bucket.wire
        self.step = state.step
        self.layout: Layout = layout(sizes_of(bucket.low), self.groups.size, self.wire.block)
        self.work: dist.Work | None = None
        self.exponent_codes = torch.empty(0, dtype=torch.int8, device="cpu")
        self.exponents = torch.empty(0, dtype=torch.int32, device="cpu")
        self.flat = torch.empty(0, dtype=torch.float32, device="cpu")
        self.in_place = False
        self.lost: Tensor | None = None
        self.signs: Tensor | None = None
        """Signs of the rotation that values have until they are decoded, if any."""
        self.message = torch.empty(0, dtype=torch.uint8, device="cpu")
        """The codes that the next stage sends, or that the last one received."""

    def start(self) -> None:
        """Gather the coded layers as float32, and begin the exchange of their exponents."""
        if not self.bucket.low:
            return
        self.flat = self._flatten()
        self._add_residuals(self.layout.layers(self.flat))
        if self.wire.block > 1:
            self.signs = self.state.signs(
                self.step, self.bucket.index, self.bucket.part, self.wire.block, self.flat.device
            )
            rotate(self.flat, self.signs)
        terms = 1 if self.state.options.accumulate == "fp32" else self.groups.size
        self.exponent_codes = exponent_codes(largest_magnitudes(self.flat, self.layout.bounds), terms)
        group = self.groups.exponents
        self.work = dist.all_reduce(self.exponent_codes, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def prepare(self) -> None:
        """Wait for the exponents; scale and encode."""
        if self.work is None:
            return
        self.work.wait()
        random = self.state.random(self.step, self.bucket.index, self.bucket.part, self.flat.device)
        self.coder = Coder(self.wire, random, bounded=self._scales_layers)
        self.exponents = factor_exponents(self.exponent_codes, self.wire.top)
        if not self._scales_layers:
            self.exponents = torch.zeros_like(self.exponents)
        if self._divides_first:
            self.flat /= self.groups.size
        feedback = self.state.options.error_feedback
        wanted = self.flat.clone() if feedback else self.flat
        self.message = self.coder.scale_and_encode(self.flat, self.layout.bounds, self.exponents)
        if feedback:
            mask = mask_factors(self.exponent_codes)
            self.lost = wanted - self.coder.decode_scaled(self.message, self.layout.bounds, -self.exponents, mask, 1)

    def scatter(self) -> None:
        """Send the codes to their owners, and layers that are not coded on their own way."""
        groups = self.groups
        reduce_plain(self.bucket, groups)
        if self.work is not None and groups.parts is None:
            size = num_bytes(self.wire, self.layout.padded)
            self.message = to_owners(self.message, size, groups.size, groups.payload)

    def reduce(self) -> None:
        """Sum what this rank owns; the hierarchical way is walked to its end here."""
        if self.work is None:
            return
        mode, groups = self.state.options.accumulate, self.groups
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
        if self.work is not None and self.groups.parts is None:
            self.message = all_gather(self.message, self.groups.gather)

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
        divisor = 1 if self._divides_first else self.groups.size
        mean = coder.decode_scaled(codes, bounds, exponents, mask, divisor, whole)
        if self.signs is not None:
            rotate_back(mean, self.signs)
        if self.lost is not None:
            self._keep_residuals(self.lost)
        if whole is None:
            for layer, view in zip(self.layout.layers(mean), self.bucket.low, strict=True):
                view.copy_(layer.view_as(view))

    @property
    def _scales_layers(self) -> bool:
        return self.state.options.scaling == "aps" and self.wire.block == 1

    @property
    def _divides_first(self) -> bool:
        return self.state.options.scaling == "none"

    def _flatten(self) -> Tensor:
        """Return the coded layers, flat: in place in the buffer where they are float32 and lie one after another."""
        low, lay = self.bucket.low, self.layout
        first = low[0].storage_offset()
        expected = [first + start for start, _ in lay.bounds]
        plain = all(v.dtype == torch.float32 and v.dim() == 1 and v.is_contiguous() for v in low)
        self.in_place = plain and lay.spans == lay.sizes and [v.storage_offset() for v in low] == expected
        if self.in_place:
            return low[0].as_strided((lay.total,), (1,))
        layers = [v.reshape(-1).to(torch.float32) for v in low]
        if lay.spans != lay.sizes:
            gaps = zip(layers, lay.spans, strict=True)
            layers = [part for v, span in gaps for part in (v, v.new_zeros(span - v.numel()))]
        return torch.cat(layers)

    def _add_residuals(self, layers: list[Tensor]) -> None:
        for layer, parameter in zip(layers, self.bucket.parameters, strict=True):
            if parameter in self.state.residuals:
                layer += self.state.residuals[parameter]

    def _keep_residuals(self, lost: Tensor) -> None:
        if self.signs is not None:
            rotate_back(lost, self.signs)
        layers = self.layout.layers(lost)
        for layer, parameter in zip(layers, self.bucket.parameters, strict=True):
            self.state.residuals[parameter] = torch.nan_to_num(layer, nan=0.0, posinf=0.0, neginf=0.0)
