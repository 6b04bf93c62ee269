"""Exchange one part of a bucket by APS, in stages that are scheduled one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exchange import (
    Largest,
    all_gather,
    exchange_hierarchical,
    set_mean,
    split_messages,
    sum_fp32,
    sum_in_format,
    to_owners,
)
from fxprec.runtime.aps.exponents import exponent_codes, factor_exponents, mask_factors
from fxprec.runtime.aps.layout import Flat, sizes_of
from fxprec.runtime.aps.nodes import Inside
from fxprec.runtime.aps.rotation import growth, rotate, rotate_back
from fxprec.runtime.aps.segments import indices_of, largest_magnitudes, scale_by_powers
from fxprec.runtime.aps.state import APSState
from fxprec.runtime.aps.wire import Sending, num_bytes


@dataclass
class Part:
    """Layers of one DDP bucket that are sent in the same way."""

    bucket: int
    views: list[Tensor]
    """Gradients of the layers; their means are written here."""
    parameters: list[Tensor]
    sending: Sending
    number: int = 0
    """Number of this part within the bucket."""


PART_ELEMENTS = 1 << 20  # 25 M gradients at 200 Mbit/s: 1.84 s in parts of this size, 2.06 s in whole 25 MiB buckets


def split_bucket(state: APSState, index: int, views: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Part]:
    """Sort a bucket's layers by how they are sent, and cut those with the same codes into parts of whole layers.

    Parts of a large bucket keep network and cores busy at once. Layers without codes are not cut.
    """
    parts: list[Part] = []
    last: dict[tuple[Sending, torch.dtype], Part] = {}
    for view, parameter in zip(views, parameters, strict=True):
        sending = state.sending_of(parameter)
        if sending.wire is None and not sending.low_rank:
            settle(state, parameter, view)
        if not view.numel():
            continue
        alike = (sending, view.dtype)
        if alike not in last or (sending.wire is not None and sum(sizes_of(last[alike].views)) >= PART_ELEMENTS):
            last[alike] = Part(index, [], [], sending, len(parts))
            parts.append(last[alike])
        last[alike].views.append(view.reshape(-1) if view.is_contiguous() else view)
        last[alike].parameters.append(parameter)
    return parts


def settle(state: APSState, parameter: Tensor, view: Tensor) -> None:
    """Add a layer's residual, what earlier codes lost, to a gradient that is not coded; drop the residual."""
    if parameter in state.residuals:
        view += state.residuals.pop(parameter).view_as(view)


class Exchange:
    """The mean over ranks of one part of a bucket, computed in stages.

    Every rank calls `start`, then the `STAGES` in order. Stages of different parts may run at the same time, each stage
    in the parts' order: each stage that communicates has its own process group. By nodes, `add` averages this rank's
    chunk over the node, the next stages exchange the chunk with other nodes, and `share` sends it to the node.

    All ranks decode the same bytes, and by nodes the ranks of one chunk have the same mean. So replicas stay
    bit-identical.
    """

    STAGES: tuple[str, ...] = ("add", "prepare", "scatter", "reduce", "gather", "finish", "share")
    OF_NODES = ("add", "share")
    """Stages that do nothing without nodes."""

    def __init__(self, state: APSState, part: Part) -> None:
        self.state = state
        self.part = part
        self.wire = part.sending.wire
        self.step = state.step
        node = state.groups.node if part.sending.by_nodes else None
        self.groups = state.groups if node is None else node.between
        inside = part.sending.inside(part.views[0].dtype)
        self.inside = None if node is None else Inside(node, sizes_of(part.views), inside)
        self.largest: Largest | None = None
        """The exchange of exponents."""
        self.exponent_codes = torch.empty(0, dtype=torch.int8, device="cpu")
        self.exponents = torch.empty(0, dtype=torch.int32, device="cpu")
        self.lost: Tensor | None = None
        self.signs: Tensor | None = None
        """Signs of the rotation that is undone when values are decoded; None without a rotation."""
        self.message = torch.empty(0, dtype=torch.uint8, device="cpu")
        """Tensor that the next stage sends, or that the last stage received."""

    def start(self) -> None:
        """Lay the layers side by side; start to exchange their exponents and, by nodes, the node's chunks."""
        self.whole = self.flat = self._flat(self.part.views, in_blocks=self.inside is None)
        if self.wire is not None:
            self._add_residuals(self.whole.layout.layers(self.whole.values))
        if self.inside is not None:
            self.inside.start(self.whole.values)
        else:
            self._rotate()
        if self.wire is not None:
            terms = 1 if self.state.options.accumulate == "fp32" else self.groups.size
            self.exponent_codes = exponent_codes(self._largest(), terms)
            self.largest = Largest(self.exponent_codes, self.state.groups.exponents)

    def add(self) -> None:
        """By nodes, average this rank's chunk over the node."""
        if self.inside is not None:
            self.flat = self._flat(self.inside.mean())
            self._rotate()

    def prepare(self) -> None:
        """Wait for the exponents; scale and encode."""
        if self.largest is not None:
            self.exponent_codes = self.largest.wait()
        if not self._is_coded or self.wire is None:
            return
        flat, bounds = self.flat.values, self.flat.layout.bounds
        if self.inside is not None:
            self.exponent_codes = self.exponent_codes[indices_of(self.inside.layer_of, flat.device)]
        random = self.state.random(self.step, self.part.bucket, self.part.number, flat.device)
        self.coder = Coder(self.wire, random, bounded=self._scales_layers)
        self.exponents = factor_exponents(self.exponent_codes, self.wire.top)
        if not self._scales_layers:
            self.exponents = torch.zeros_like(self.exponents)
        if self._divides_first:
            flat /= self.groups.size
        feedback = self.state.options.error_feedback
        wanted = flat.clone() if feedback else flat
        self.message = self.coder.scale_and_encode(flat, bounds, self.exponents)
        if feedback:
            mask = mask_factors(self.exponent_codes)
            self.lost = wanted - self.coder.decode_scaled(self.message, bounds, -self.exponents, mask, 1)

    def scatter(self) -> None:
        """Send codes to their owners; all-reduce layers without codes."""
        groups = self.groups
        if not self.flat.values.numel():
            return
        if self.wire is None:
            self.message = self.flat.values.to(self.part.sending.dtype or self.part.views[0].dtype)
            dist.all_reduce(self.message, group=groups.payload)
        elif self._is_direct:
            self.message = all_gather(self.message, groups.payload)
        elif groups.parts is None:
            size = num_bytes(self.wire, self.flat.layout.padded)
            self.message = to_owners(self.message, size, groups.size, groups.payload)

    def reduce(self) -> None:
        """Sum the codes that this rank owns. The hierarchical all-reduce runs completely in this stage."""
        if not self._is_coded or self._is_direct:
            return
        mode, groups, lay = self.state.options.accumulate, self.groups, self.flat.layout
        if mode == "fp32":
            lost = None if self.lost is None else torch.zeros_like(self.lost)
            self.message = sum_fp32(self.message, self.coder, lay, groups.rank, lost)
            if self.lost is not None and lost is not None:
                scale_by_powers(lost, lay.bounds, -self.exponents)
                self.lost += lost
        elif groups.parts is None:
            self.message = sum_in_format(self.message, self.coder, groups.rank, kahan=mode == "kahan")
        else:
            self.message = exchange_hierarchical(self.message, self.coder, groups.parts, kahan=mode == "kahan")

    def gather(self) -> None:
        """Collect the codes of the sum from their owners."""
        if self._is_coded and not self._is_direct and self.groups.parts is None:
            self.message = all_gather(self.message, self.groups.gather)

    def finish(self) -> None:
        """Decode, unscale, divide by the number of ranks, and write the mean into the layers or the chunk's pieces."""
        if self._is_coded:
            self.flat.write(self._added() if self._is_direct else self._decoded())
        elif self.flat.values.numel():
            set_mean(self.flat.values, self.message, self.groups.size)
            self.flat.write(self.flat.values)

    def share(self) -> None:
        """By nodes, send the chunk to the node, and write all chunks into the layers."""
        if self.inside is not None:
            self.inside.share(self.whole.values)
            self.whole.write(self.whole.values)

    def _added(self) -> Tensor:
        """Return the mean of two nodes' codes, summed on this rank."""
        bounds, mask = self.flat.layout.bounds, mask_factors(self.exponent_codes)
        mean = self.coder.sum(self.message)
        scale_by_powers(mean, bounds, -self.exponents, mask)
        mean /= 1 if self._divides_first else self.groups.size
        return self._settled(mean)

    def _decoded(self) -> Tensor:
        lay, device, fp32 = self.flat.layout, self.exponents.device, self.state.options.accumulate == "fp32"
        if fp32:
            codes, second = split_messages(self.message, lay)
        else:
            codes, second = self.message.reshape(-1), torch.zeros(len(lay.pieces), dtype=torch.int32, device=device)
        layer_of = indices_of(lay.layer_of, device)
        exponents = -second - self.exponents[layer_of]
        mask = mask_factors(self.exponent_codes)[layer_of]
        bounds = [(p.start, p.end) for p in lay.pieces]
        coder = self.coder if fp32 else replace(self.coder, bounded=False)
        divisor = 1 if self._divides_first else self.groups.size
        into = self.flat.values if self.flat.in_place else None
        return self._settled(coder.decode_scaled(codes, bounds, exponents, mask, divisor, into))

    def _settled(self, mean: Tensor) -> Tensor:
        """Undo the mean's rotation, if any, and keep what was lost as residuals."""
        if self.signs is not None:
            rotate_back(mean, self.signs)
        if self.lost is not None:
            self._keep_residuals(self.lost)
        return mean

    @property
    def _is_coded(self) -> bool:
        """Return whether this rank exchanges codes: its chunk of a small part may be empty."""
        return self.wire is not None and self.flat.values.numel() > 0

    @property
    def _is_direct(self) -> bool:
        """Return whether two nodes send each other all codes: as many bytes as by owners, and one rounding less."""
        return self.inside is not None and self.groups.size == 2

    @property
    def _scales_layers(self) -> bool:
        return self.wire is not None and self.state.options.scaling == "aps" and self.wire.block == 1

    @property
    def _divides_first(self) -> bool:
        return self.state.options.scaling == "none"

    def _flat(self, views: list[Tensor], *, in_blocks: bool = True) -> Flat:
        if self.wire is None:
            return Flat(views, self.groups.size, dtype=None)
        return Flat(views, self.groups.size, self.wire.block if in_blocks else 1)

    def _rotate(self) -> None:
        if self.wire is not None and self.wire.block > 1:
            device = self.flat.values.device
            self.signs = self.state.signs(self.step, self.part.bucket, self.part.number, self.wire.block, device)
            rotate(self.flat.values, self.signs)

    def _largest(self) -> Tensor:
        """Return the largest magnitude that each layer may be coded with; inf if a rotation could overflow."""
        found = largest_magnitudes(self.whole.values, self.whole.layout.bounds)
        if self.inside is None or self.wire is None:
            return found
        return self.inside.rounded(found) * growth(self.wire.block)

    def _add_residuals(self, layers: list[Tensor]) -> None:
        for layer, parameter in zip(layers, self.part.parameters, strict=True):
            if parameter in self.state.residuals:
                layer += self.state.residuals.pop(parameter)

    def _keep_residuals(self, lost: Tensor) -> None:
        if self.signs is not None:
            rotate_back(lost, self.signs)
        layers = self.flat.layout.layers(lost)
        owed = layers if self.inside is None else self.inside.owed(layers)
        for layer, parameter in zip(owed, self.part.parameters, strict=True):
            self.state.residuals[parameter] = torch.nan_to_num(layer, nan=0.0, posinf=0.0, neginf=0.0)
