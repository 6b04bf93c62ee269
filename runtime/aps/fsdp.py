"""Reduce-scatter gradients in few bits under FSDP2, through `FSDPModule.set_custom_reduce_scatter`.

This is the first half of the fp32 accumulation (docs/algorithms.md, "Communication in 8 bits"): codes go to the shard's
owner, which adds in float32; the sum is not rounded again. By nodes, a node's ranks first add what they send to the
same ranks of other nodes. Limits, each with a clear error: only accumulate="fp32" and scaling="aps", only SUM and AVG,
no error feedback, and keep_high by whole FSDP2 modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from fxprec.compat import sharded_parameters
from fxprec.errors import ConfigError
from fxprec.numerics.blocks import BlockFormat
from fxprec.runtime import on_device
from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exchange import Largest
from fxprec.runtime.aps.exponents import exponent_codes, factor_exponents, mask_factors
from fxprec.runtime.aps.fsdp_gather import APSAllGather, way_of_parameters
from fxprec.runtime.aps.groups import agree
from fxprec.runtime.aps.hook import NO_CAPTURE
from fxprec.runtime.aps.layout import bounds_of
from fxprec.runtime.aps.link_trial import Clock
from fxprec.runtime.aps.nodes import sums_inside
from fxprec.runtime.aps.rotation import rotate, rotate_back
from fxprec.runtime.aps.segments import largest_magnitudes, scale_by_powers
from fxprec.runtime.aps.shards import Shards, filled
from fxprec.runtime.aps.state import APSState
from fxprec.runtime.aps.wire import Sending, Wire

BLOCK = 1 << 16  # elements that share an exponent if a shard's layers are not known


class APSReduceScatter(ReduceScatter):
    """Reduce-scatter of codes for one `FSDPModule`; a call is a step of the schedule.

    Each layer of `shards` has its own scale. If the layers' sizes do not add up (parameters without a gradient), blocks
    of 2^16 elements share a scale. Raises `ConfigError` for options that a reduce-scatter cannot honour.
    """

    def __init__(self, state: APSState, shards: Shards) -> None:
        chosen = state.options
        if chosen.accumulate != "fp32" or chosen.scaling != "aps" or chosen.error_feedback:
            raise ConfigError(
                f"APS under FSDP2 cannot honour ({chosen.text()}); it needs accumulate='fp32', scaling='aps' and no "
                "error feedback"
            )
        self.state = state
        self.shards = shards
        self._whole: Clock | None = None
        """When the next gradients were complete: FSDP2 allocates their buffer on the backward pass's stream."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer, as FSDP2's default does."""
        if self.state.by_link is not None:
            self._whole = self._whole or Clock(device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write the sum (or average) over ranks of this rank's row of `input_tensor` (world * n,) to (n,)."""
        on_device.refuse_capture(input_tensor.device, "use_aps's reduce-scatter runs", NO_CAPTURE)
        world = dist.get_world_size(group)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigError(
                f"APS under FSDP2 cannot reduce with {op}; leave the gradient divide factor at its default"
            )
        step = self.state.first_step + self.state.calls[self]
        self.state.calls[self] += 1
        begins, self.state.step = step >= self.state.step, max(self.state.step, step + 1)
        with torch.no_grad():
            try:
                total = self._total(input_tensor.view(world, -1), step, begins, output_tensor, group)
            except RuntimeError as error:
                raise self.state.named(error) from error
            output_tensor.copy_(total / world if op == dist.ReduceOp.AVG else total)
        return None

    def _total(self, rows: Tensor, step: int, begins: bool, like: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum over ranks of this rank's row of `rows` (world, n), in the dtype of `like` or a wider one."""
        by_link, node = self.state.by_link, self.state.groups.node
        sending = Sending(self.state.wire, by_nodes=node is not None)
        if (by_link is not None or node is not None) and len(rows) != self.state.groups.size:
            asked = "group_size=" if by_link is None else "bits='by link'"
            raise ConfigError(
                f"{asked} plans for {self.state.groups.size} ranks and FSDP2 shards over {len(rows)}; build the state "
                "with process_group= the group of the mesh dimension that is sharded"
            )
        if by_link is not None:
            by_link.bucket_ready(step, begins, self.shards.parameters, self.shards.views(rows), self._whole)
            self._whole = None
            sending = by_link.sending_of(self.shards.parameters[0])
        if self.state.is_high(step):
            return _high(rows, like, group)
        if node is not None and sending.by_nodes:
            rows, group = sums_inside(rows, node, sending.inside(rows.dtype)), node.between.payload
        coding = sending.coding
        if coding is None or isinstance(coding, torch.dtype):
            wide = torch.promote_types(rows.dtype, torch.float32)
            return _sent_plain(rows.to(coding or rows.dtype), group).sum(0, dtype=wide)
        if coding.block > 1:
            return self._in_blocks(rows, step, group, coding)
        return self._in_layers(rows.float(), step, group, coding)

    def _in_blocks(self, rows: Tensor, step: int, group: dist.ProcessGroup, wire: Wire) -> Tensor:
        """Rotate and send blocks with a scale each; return the sum of this rank's row."""
        parts, world, block = self._parts(rows.shape[1]), len(rows), wire.block
        pieces = [filled(piece, block).view(world, -1) for piece in rows.split(parts, 1)]
        flat = torch.cat(pieces, 1)
        signs = self.state.signs(step, self.shards.index, 0, block, rows.device)
        rotate(flat.view(-1), signs)
        coder = Coder(wire, self.state.random(step, self.shards.index, 0, rows.device), bounded=False)
        total = coder.sum(_sent_plain(coder.encode(flat.view(-1)).view(world, -1), group))
        rotate_back(total, signs)
        spans = total.split([piece.shape[1] for piece in pieces])
        return torch.cat([span[:size] for span, size in zip(spans, parts, strict=True)])

    def _in_layers(self, rows: Tensor, step: int, group: dist.ProcessGroup, wire: Wire) -> Tensor:
        """Scale each layer by a power of two and send it; return this rank's sum. Overwrites `rows` (world, n)."""
        world, length = rows.shape
        parts, flat = self._parts(length), rows.reshape(-1)
        bounds = bounds_of(tuple(parts) * world)
        codes = exponent_codes(largest_magnitudes(flat, bounds))
        codes = Largest(codes, group).wait()
        exponents = factor_exponents(codes, wire.top)
        scale_by_powers(flat, bounds, exponents)
        coder = Coder(wire, self.state.random(step, self.shards.index, 0, rows.device), bounded=True)
        total = coder.sum(_sent_plain(coder.encode(flat).view(world, -1), group))
        mine = slice(dist.get_rank(group) * len(parts), (dist.get_rank(group) + 1) * len(parts))
        scale_by_powers(total, bounds_of(tuple(parts)), -exponents[mine], mask_factors(codes[mine]))
        return total

    def _parts(self, length: int) -> list[int]:
        if sum(self.shards.sizes) == length:
            return list(self.shards.sizes)
        return [min(BLOCK, length - at) for at in range(0, length, BLOCK)]


def _high(rows: Tensor, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = torch.empty_like(like)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
    scatter(total, rows.reshape(-1), group=group)
    return total


def _sent_plain(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send each row to its owner; return this rank's row from every rank (world, n)."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received


def use_aps(
    model: nn.Module,
    state: APSState,
    *,
    parameters: str | BlockFormat | None = None,
    exact_every: int | None = None,
) -> int:
    """Set the state's reduce-scatter on each `FSDPModule` of a model wrapped by `fully_shard`; return how many.

    `parameters` is a block format in which parameters are gathered, or ``"by link"``: then the state's plan chooses the
    bits. None keeps FSDP2's all-gather. A rank's own shards stay exact. Matrices are rounded; parameters of less than
    two dimensions are gathered unchanged.

    With `exact_every`, ranks send what matrices have changed since the last gather, and every `exact_every`-th gather
    sends them as they are. By link these differences are the way of 4 bits. Each rank then keeps the parameters of such
    modules whole, in the dtype in which they are gathered, and the backward pass gathers nothing.

    Modules whose own parameters are all in the state's `keep_high` stay as they are. Raises `ConfigError` if there is
    no FSDP2 module, if `keep_high` names only a part of one or nothing of this model, or if ranks gather differently;
    `FormatError` for a format without blocks.
    """
    owners = {name or "model": m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not owners:
        raise ConfigError("use_aps found no FSDP2 module; call fully_shard on the model first")
    if state.keeps_any and not any(state.keeps_high(p) for p in model.parameters()):
        raise ConfigError(
            "keep_high holds no parameter of this model as it is now; fully_shard replaces parameters: build APSState "
            "after it"
        )
    low = {name: owner for name, owner in owners.items() if not _stays_high(owner, state)}
    way = way_of_parameters(state, parameters, exact_every)
    said = f"parameters={parameters!s}, {len(low)} modules" + f", exact_every={exact_every}" * (exact_every is not None)
    agree(said, state.groups.exponents, "use_aps differs between ranks")
    every = [Shards.of(name, owner, index) for index, (name, owner) in enumerate(low.items())]
    if state.by_link is not None:
        state.by_link.sharded(every, gathers=parameters == "by link", exact_every=exact_every)
    for owner, shards in zip(low.values(), every, strict=True):
        owner.set_custom_reduce_scatter(APSReduceScatter(state, shards))
        if parameters is not None:
            owner.set_custom_all_gather(APSAllGather(state, shards, way, owner))
    return len(low)


def _stays_high(owner: FSDPModule, state: APSState) -> bool:
    kept = [state.keeps_high(p) for p in sharded_parameters(owner)]
    if any(kept) and not all(kept):
        raise ConfigError(
            f"keep_high names {sum(kept)} of the {len(kept)} parameters that FSDP2 reduces together in "
            f"{type(owner).__name__}; call fully_shard on the module to be kept high first"
        )
    return any(kept)
