"""APS under FSDP2: the reduce-scatter of gradients in 8 bits, through `FSDPModule.set_custom_reduce_scatter`.

The first half of the fp32 accumulation (docs/algorithms.md, "Communication in 8 bits"): codes go to the shard's owner,
which adds in float32; the sum is not rounded again. Limits, each with a clear error: accumulate="fp32" and
scaling="aps" only, SUM and AVG only, no error feedback, and keep_high by whole FSDP2 modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from fxprec.errors import ConfigError
from fxprec.runtime import on_device
from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exponents import exponent_codes, factor_exponents, mask_factors
from fxprec.runtime.aps.hook import NO_CAPTURE
from fxprec.runtime.aps.layout import bounds_of
from fxprec.runtime.aps.segments import largest_magnitudes, scale_by_powers
from fxprec.runtime.aps.state import APSState

BLOCK = 1 << 16  # elements that share an exponent where a shard's layers are not known


class APSReduceScatter(ReduceScatter):
    """Reduce-scatter of codes for one `FSDPModule`, the `index`-th of its model; a call is a step of the schedule.

    `sizes`: elements of each layer in one rank's padded shard, so each layer has its own scale; where they do not
    add up (parameters without a gradient), blocks of 2^16 elements share one. Raises `ConfigError` for options that
    a reduce-scatter cannot honour.
    """

    def __init__(self, state: APSState, sizes: Sequence[int] = (), index: int = 0) -> None:
        chosen = state.options
        alike = state.wire.block == 1 and state.by_link is None
        if chosen.accumulate != "fp32" or chosen.error_feedback or chosen.scaling != "aps" or not alike:
            raise ConfigError(
                f"APS under FSDP2 cannot honour ({chosen.text()}); it needs accumulate='fp32', scaling='aps' and no "
                "error feedback, and one format without blocks"
            )
        self.state = state
        self.sizes = tuple(sizes)
        self.index = index
        self.calls = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a fresh buffer, as FSDP2's default."""
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
        step = self.state.first_step + self.calls
        self.calls += 1
        self.state.step = max(self.state.step, step + 1)
        with torch.no_grad():
            if self.state.is_high(step):
                total = _high(input_tensor, output_tensor, group)
            else:
                total = self._low(input_tensor.float().view(world, -1), step, group)
            output_tensor.copy_(total / world if op == dist.ReduceOp.AVG else total)
        return None

    def _low(self, rows: Tensor, step: int, group: dist.ProcessGroup) -> Tensor:
        """Sum of all ranks' coded row for this rank; `rows` (world, n) is not needed afterwards."""
        world, length = rows.shape
        parts, flat = self._parts(length), rows.reshape(-1)
        bounds = bounds_of(tuple(parts) * world)
        codes = exponent_codes(largest_magnitudes(flat, bounds))
        dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=group)
        exponents = factor_exponents(codes, self.state.wire.top)
        scale_by_powers(flat, bounds, exponents)
        coder = Coder(self.state.wire, self.state.random(step, self.index, 0, rows.device), bounded=True)
        sent = coder.encode(flat)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        total = coder.sum(received.view(world, -1))
        mine = slice(dist.get_rank(group) * len(parts), (dist.get_rank(group) + 1) * len(parts))
        scale_by_powers(total, bounds_of(tuple(parts)), -exponents[mine], mask_factors(codes[mine]))
        return total

    def _parts(self, length: int) -> list[int]:
        if sum(self.sizes) == length:
            return list(self.sizes)
        return [min(BLOCK, length - at) for at in range(0, length, BLOCK)]


def _high(rows: Tensor, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = torch.empty_like(like)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
    scatter(total, rows, group=group)
    return total


def use_aps(model: nn.Module, state: APSState) -> int:
    """Give the `FSDPModule`s of a model that `fully_shard` has wrapped the 8-bit reduce-scatter; return how many.

    Modules whose own parameters are all in the state's `keep_high` stay as they are. Raises `ConfigError` where there
    is no FSDP2 module, and for a `keep_high` that names a part of one, or nothing of this model.
    """
    owners = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not owners:
        raise ConfigError("use_aps found no FSDP2 module; call fully_shard on the model first")
    if state.keeps_any and not any(state.keeps_high(p) for p in model.parameters()):
        raise ConfigError(
            "keep_high holds no parameter of this model as it is now; fully_shard replaces parameters: build APSState "
            "after it"
        )
    low = [owner for owner in owners if not _stays_high(owner, state)]
    for index, owner in enumerate(low):
        owner.set_custom_reduce_scatter(APSReduceScatter(state, _shard_sizes(owner), index))
    return len(low)


def _stays_high(owner: nn.Module, state: APSState) -> bool:
    kept = [state.keeps_high(p) for p in _own_parameters(owner)]
    if any(kept) and not all(kept):
        raise ConfigError(
            f"keep_high names {sum(kept)} of the {len(kept)} parameters that FSDP2 reduces together in "
            f"{type(owner).__name__}; call fully_shard on the module to be kept high first"
        )
    return any(kept)


def _own_parameters(owner: nn.Module) -> list[Tensor]:
    """Return the parameters that FSDP2 reduces with this module, in its order: those of no FSDP2 module inside it."""
    nested = {id(p) for m in owner.modules() if m is not owner and isinstance(m, FSDPModule) for p in m.parameters()}
    return [p for p in owner.parameters() if id(p) not in nested]


def _shard_sizes(owner: nn.Module) -> list[int]:
    """Return the elements of each of the module's own parameters in one rank's padded shard, in FSDP2's order."""
    sizes = []
    for p in _own_parameters(owner):
        if isinstance(p, DTensor):
            sharded = (k for k, placement in enumerate(p.placements) if placement.is_shard())
            world = math.prod(p.device_mesh.size(k) for k in sharded)
            rows = -(-p.shape[0] // world) if p.dim() else 1
            sizes.append(rows * (p.numel() // p.shape[0] if p.dim() and p.shape[0] else 1))
    return sizes
