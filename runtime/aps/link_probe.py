"""Measure what a link plan needs: bytes per second and latency of the process groups, and the cost of each width.

All ranks call these functions together. Every result is the slowest rank's, so it is the same on all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exchange import set_mean
from fxprec.runtime.aps.groups import Groups, communication_device
from fxprec.runtime.aps.link_problem import Width
from fxprec.runtime.aps.link_widths import in_low_rank
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.low_rank import Factors, Memory
from fxprec.runtime.aps.predict import Link
from fxprec.runtime.aps.rotation import rotate, rotate_back, signs_of
from fxprec.runtime.aps.wire import Coding, Wire

FIRST_SECONDS = 0.3
"""Approximate length of the transfers that first measure a link, three times; a probe takes up to two seconds."""
NEXT_SECONDS = 0.05
"""Approximate length of later transfers, which only show whether the link has changed."""
LARGEST = 1 << 26  # bytes
ELEMENTS = 1 << 18
_ROUNDS = 3


def largest_of_ranks(values: list[float], group: dist.ProcessGroup) -> list[float]:
    """Return, for each value, the largest over all ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=communication_device(group))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [float(x) for x in found.tolist()]


def probe_links(groups: Groups, last: Links | None = None) -> Links:
    """Measure the links: by growing transfers at first, by short ones if `last` has their approximate speed.

    All ranks of a node send at the same time.
    """
    node, everyone = groups.node, groups.exponents
    if node is None:
        link, exchange = _probe(groups.payload, everyone, None if last is None else last.between)
        return Links(link, exchange=exchange)
    inside, _ = _probe(node.scatter, everyone, None if last is None else last.inside)
    of_node = None if last is None else Link(last.between.bytes_per_second / node.size, last.between.latency)
    share, exchange = _probe(node.between.payload, everyone, of_node)
    return Links(Link(share.bytes_per_second * node.size, share.latency), inside, node.size, exchange)


def _probe(group: dist.ProcessGroup, everyone: dist.ProcessGroup, last: Link | None) -> tuple[Link, float]:
    """Return a rank's link to the others of its group, and the seconds that cores work on a small exchange there."""
    world = dist.get_world_size(group)

    def seconds_of(size: int) -> list[float]:
        return largest_of_ranks(_exchange_seconds(size, group, everyone), everyone)

    small = [seconds_of(world) for _ in range(_ROUNDS + 2)]
    latency, worked = (statistics.median(column) for column in zip(*small, strict=True))
    wanted = FIRST_SECONDS if last is None else NEXT_SECONDS
    size = 1 << 16 if last is None else min(LARGEST, max(1 << 16, int(last.bytes_per_second * wanted)))
    while seconds_of(size)[0] < wanted / 2 and size < LARGEST and last is None:
        size = min(LARGEST, 2 * size)
    seconds = min(seconds_of(size)[0] for _ in range(_ROUNDS))  # the first transfers wait for TCP's window
    sent = size // world * (world - 1)
    return Link(sent / max(seconds - latency, seconds / 10), latency), worked * _crowd(everyone)


def _crowd(group: dist.ProcessGroup) -> float:
    """Return the ratio of elapsed to CPU time of a rank's work while all ranks work; at least 1."""
    x = torch.linspace(-1, 1, ELEMENTS, dtype=torch.float32, device="cpu")
    dist.barrier(group)
    start, worked = time.perf_counter(), time.thread_time()
    for _ in range(32):
        x.mul_(1.0)
    took, worked = time.perf_counter() - start, time.thread_time() - worked
    return max(1.0, largest_of_ranks([took / max(worked, 1e-9)], group)[0])


def _exchange_seconds(size: int, group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> list[float]:
    """Return the seconds of an all-to-all of `size` bytes in a group, which all ranks begin together.

    The second number is the CPU time of this process meanwhile, on all its threads.
    """
    world, device = dist.get_world_size(group), communication_device(group)
    sent = torch.zeros(-(-size // world) * world, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    dist.barrier(everyone)
    worked = time.process_time()
    taken = _timed(lambda: dist.all_to_all_single(received, sent, group=group), device)
    return [taken, time.process_time() - worked]


def _timed(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def probe_widths(widths: dict[Width, Coding], device: torch.device, group: dist.ProcessGroup) -> tuple[Width, ...]:
    """Return the widths with the seconds per element to encode and to decode while all ranks work."""
    found = []
    for width, coding in widths.items():
        encode, decode = (0.0, 0.0) if coding is None else _coding_seconds(coding, device, group)
        found.append(replace(width, encode=encode / ELEMENTS, decode=decode / ELEMENTS))
    return tuple(found)


def probe_low_rank(cast: Width, rank: int, memory: Memory, group: dist.ProcessGroup) -> Width:
    """Return the width in low rank beside `cast`, with its seconds per element while all ranks work."""
    device = communication_device(group)
    matrix = torch.linspace(-1, 1, ELEMENTS, dtype=torch.float32, device=device).view(-1, 1 << 9)
    start = memory.first(matrix.shape[1], rank, device)
    owed, mean = matrix.clone(), torch.empty_like(matrix)
    step = Factors([owed], [start])
    p, q, _ = step.pairs(step.columns(step.rows()))[0]

    def encode() -> None:
        owed.add_(matrix)
        step = Factors([owed], [start])
        step.columns(step.rows())

    def decode() -> None:
        torch.mm(p, q.T, out=mean)
        owed.addmm_(p, q.T, alpha=-1)

    seconds = usual([encode, decode], device, group)
    return in_low_rank(cast, rank, *(s / ELEMENTS for s in seconds))


def _coding_seconds(coding: Wire | torch.dtype, device: torch.device, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the seconds that an exchange works on `ELEMENTS` gradients before the transfer, and after it."""
    x = torch.linspace(-1, 1, ELEMENTS, dtype=torch.float32, device=device)
    world = dist.get_world_size(group)
    encode, decode = _casts(coding, x, world) if isinstance(coding, torch.dtype) else _coders(coding, x, world)
    both = usual([encode, decode], device, group)
    return both[0], both[1]


Work = Callable[[], object]


def usual(works: Sequence[Work], device: torch.device, group: dist.ProcessGroup) -> list[float]:
    """Return the median seconds of each work on the slowest rank, while all ranks work."""
    for work in works:
        work()
    dist.barrier(group)
    seconds = [[_timed(work, device) for work in works] for _ in range(3 * _ROUNDS)]
    return largest_of_ranks([statistics.median(column) for column in zip(*seconds, strict=True)], group)


def _casts(dtype: torch.dtype, x: Tensor, world: int) -> tuple[Work, Work]:
    total = x.to(dtype)
    return lambda: x.to(dtype), lambda: set_mean(x, total, world)


def _coders(wire: Wire, x: Tensor, world: int) -> tuple[Work, Work]:
    coder = Coder(wire, None, bounded=wire.block == 1)
    bounds, zero = [(0, ELEMENTS)], torch.zeros(1, dtype=torch.int32, device=x.device)
    one = torch.ones(1, dtype=torch.float32, device=x.device)
    signs = None if wire.block == 1 else signs_of(0, wire.block, x.device)
    share = max(ELEMENTS // world // wire.block, 1) * wire.block

    def encode() -> Tensor:
        if signs is not None:
            rotate(x, signs)
        return coder.scale_and_encode(x, bounds, zero)

    codes = encode()
    rows = codes[: share // wire.block * wire.code_bytes].repeat(world, 1)

    def decode() -> None:
        total = coder.sum(rows)
        coder.scale_and_encode(total, [(0, share)], zero)
        coder.decode_scaled(codes, bounds, zero, one, world, x)
        if signs is not None:
            rotate_back(x, signs)

    return encode, decode
