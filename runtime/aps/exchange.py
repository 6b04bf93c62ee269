"""Exchange the payload: send codes to their owner, sum them there, send the sum's codes to all ranks.

Definitions: docs/algorithms.md, "Communication in 8 bits". A rank sends as many bytes as in a ring all-reduce of codes,
2 (N - 1) / N of the bucket. All ranks decode the same bytes, so replicas stay bit-identical whatever is rounded before.

Gloo's collectives pass messages around a ring: an all-gather takes N - 1 exchanges one after the other, an all-reduce
2 (N - 1), each as long as a message and its notice take there and back. An all-to-all takes one. So over Gloo small
messages go from each rank to each other rank, and sums are made by owners. NCCL's collectives are taken as they are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exponents import ceil_log2
from fxprec.runtime.aps.groups import SubGroups
from fxprec.runtime.aps.layout import Layout, layout
from fxprec.runtime.aps.segments import Bounds, largest_magnitudes

_HEADER = torch.int16
DIRECT_BYTES = 1 << 16
"""Largest message that goes to each rank at once. Of larger ones a ring sends less between nodes of several ranks."""
all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


def sum_fp32(rows: Tensor, coder: Coder, lay: Layout, rank: int, lost: Tensor | None = None) -> Tensor:
    """Return this owner's message: all ranks' codes of its chunk, added in float32 in rank order, rounded again.

    The owner scales its pieces of layers by a second power of two and sends those exponents before the codes. The error
    of the second rounding is written to `lost` (total,), if given, scaled like the codes.
    """
    total = coder.sum(rows)
    owned = lay.owned(rank)
    start = rank * lay.chunk
    bounds = [(p.start - start, p.end - start) for p in owned]
    if coder.bounded:
        exponents = _second_exponents(total, bounds, coder)
    else:
        exponents = torch.zeros(len(owned), dtype=torch.int32, device=total.device)
    header = torch.zeros(lay.max_pieces, dtype=_HEADER, device=total.device)
    header[: len(owned)] = exponents
    wanted = total.clone() if lost is not None else total
    sent = coder.scale_and_encode(total, bounds, exponents)
    if lost is not None:
        mask = torch.ones(len(owned), dtype=torch.float32, device=total.device)
        got = coder.decode_scaled(sent, bounds, -exponents, mask, 1)
        lost[start : start + got.numel()] = wanted[: got.numel()] - got
    return torch.cat([header.view(torch.uint8), sent])


def _second_exponents(total: Tensor, bounds: Bounds, coder: Coder) -> Tensor:
    """Return the exponent of the second power of two for each piece; 0 for a piece of zeros or one not finite."""
    wide = largest_magnitudes(total, bounds).double()
    usable = torch.isfinite(wide) & (wide > 0)
    return torch.where(usable, coder.wire.top - ceil_log2(torch.where(usable, wide, 1.0)), 0)


def split_messages(messages: Tensor, lay: Layout) -> tuple[Tensor, Tensor]:
    """Return the codes (padded,) of all owners' messages, and the second exponent (int32) of each of `lay.pieces`."""
    header_bytes = lay.max_pieces * _HEADER.itemsize
    codes = messages[:, header_bytes:].reshape(-1)
    headers = messages[:, :header_bytes].contiguous().view(_HEADER).to(torch.int32)
    return codes, torch.cat([headers[r, : len(lay.owned(r))] for r in range(lay.num_ranks)])


def sum_in_format(rows: Tensor, coder: Coder, rank: int, kahan: bool) -> Tensor:
    """Return codes of this owner's chunk with every partial sum rounded to the wire format, in ring order.

    The sum of rank c's chunk starts with rank c + 1 and ends with rank c.
    """
    order = [rows[(rank + 1 + k) % len(rows)] for k in range(len(rows))]
    return coder.codes_of(accumulate(order, coder, kahan))


def exchange_hierarchical(codes: Tensor, coder: Coder, groups: SubGroups, kahan: bool) -> Tensor:
    """Return codes of the sum: each master adds its members in rank order, then masters form a ring and broadcast."""
    if groups.masters is None:
        dist.gather(codes, None, dst=groups.master, group=groups.members)
        result = torch.empty_like(codes)
    else:
        rows = [torch.empty_like(codes) for _ in range(dist.get_world_size(groups.members))]
        dist.gather(codes, rows, dst=groups.master, group=groups.members)
        result = _ring(coder.codes_of(accumulate(rows, coder, kahan)), coder, groups.masters, kahan)
    dist.broadcast(result, groups.master, group=groups.members)
    return result


def _ring(codes: Tensor, coder: Coder, group: dist.ProcessGroup, kahan: bool) -> Tensor:
    count = codes.numel() // coder.wire.code_bytes
    lay = layout((count,), dist.get_world_size(group))
    rows = to_owners(codes, lay.padded * coder.wire.code_bytes, lay.num_ranks, group)
    chunk = sum_in_format(rows, coder, dist.get_rank(group), kahan)
    return all_gather(chunk, group).reshape(-1)[: codes.numel()].contiguous()


def accumulate(rows: list[Tensor], coder: Coder, kahan: bool) -> Tensor:
    """Return the sum of coded rows in order, each operation rounded to the wire format; `kahan` compensates losses."""
    total = coder.values_of(rows[0])
    lost = torch.zeros_like(total)
    for row in rows[1:]:
        term = coder.values_of(row)
        if not kahan:
            total = coder.round(total + term)
            continue
        term = coder.round(term - lost)
        moved = coder.round(total + term)
        lost = coder.round(coder.round(moved - total) - term)
        total = moved
    return total


def to_owners(codes: Tensor, size: int, num_ranks: int, group: dist.ProcessGroup) -> Tensor:
    """Send chunks, `size` elements in all, to their owners; return this rank's chunk from every rank (num_ranks, n)."""
    sent = F.pad(codes, (0, size - codes.numel())) if codes.numel() < size else codes
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.view(num_ranks, -1)


def all_gather(message: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's message (n,) as a row (num_ranks, n)."""
    size = dist.get_world_size(group)
    gathered = message.new_empty(size * message.numel())
    if is_direct(message, group):
        dist.all_to_all_single(gathered, message.repeat(size), group=group)
    else:
        all_gather_into(gathered, message, group=group)
    return gathered.view(size, -1)


def is_direct(message: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a message goes from each rank to each other rank, not around a ring."""
    return passes_on(group) and message.nbytes <= DIRECT_BYTES


def passes_on(group: dist.ProcessGroup) -> bool:
    """Return whether a group's all-reduce and all-gather take an exchange for each other rank."""
    return dist.get_backend(group) == "gloo"


def ring_steps(group: dist.ProcessGroup) -> int:
    """Return the exchanges one after the other of an all-reduce; 1 where the backend has shorter ways than a ring."""
    return max(1, 2 * (dist.get_world_size(group) - 1)) if passes_on(group) else 1


class Largest:
    """The largest value of each element over ranks. The exchange begins with the object; `wait` ends it."""

    def __init__(self, values: Tensor, group: dist.ProcessGroup) -> None:
        self._values = values
        self._rows: Tensor | None = None
        if is_direct(values, group):
            sent = values.repeat(dist.get_world_size(group), 1)
            self._rows = torch.empty_like(sent)
            self._work = dist.all_to_all_single(self._rows, sent, group=group, async_op=True)
        else:
            self._work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True)

    @property
    def has_arrived(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """Return the largest values; on a GPU they are ready for what the current stream does next."""
        assert self._work is not None
        self._work.wait()
        return self._values if self._rows is None else self._rows.amax(0)


def sum_over_ranks(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' `flat` (n,), in its dtype; may overwrite it.

    Over Gloo the owner of a chunk adds it in float32 or wider in rank order, and rounds once.
    """
    if not passes_on(group):
        dist.all_reduce(flat, group=group)
        return flat
    num_ranks = dist.get_world_size(group)
    rows = to_owners(flat, num_ranks * -(-flat.numel() // num_ranks), num_ranks, group)
    total = rows.sum(0, dtype=torch.promote_types(flat.dtype, torch.float32))
    return all_gather(total.to(flat.dtype), group).view(-1)[: flat.numel()]


def set_mean(flat: Tensor, total: Tensor, num_ranks: int) -> None:
    """Write into `flat` a sum divided by its number of terms; the sum may have another dtype or the same memory."""
    if total.data_ptr() != flat.data_ptr():
        flat.copy_(total)
    flat.div_(num_ranks)
