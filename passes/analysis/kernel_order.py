"""Order a graph's kernels to save memory: kernels that allocate memory run late, kernels that free memory run early.

Autograd's order computes a gradient long before its reader runs, and a recomputed tensor before the GEMM that reads it.
It widens each parameter's gradient at once. All these tensors then wait in memory together.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Buffer = TypeVar("Buffer", bound=Hashable)


@dataclass(frozen=True)
class Kernel(Generic[Buffer]):
    """One kernel: the buffers that it writes and reads, in bytes, and the kernels that must run before it."""

    makes: Mapping[Buffer, int]
    reads: Mapping[Buffer, int]
    """Buffers that the caller keeps are left out."""
    after: frozenset[int]
    workspace: int = 0
    """Bytes that the kernel allocates while it runs."""
    over: frozenset[Buffer] = frozenset()
    """Buffers as large as its result, in which Inductor writes the result if nothing reads them later."""


def better_order(kernels: Sequence[Kernel[Buffer]], kept: Collection[Buffer] = frozenset()) -> list[int] | None:
    """Return `saving_order`; None if the given order is possible and has no higher peak.

    Plans and code ask this, so both take the same order.
    """
    order = saving_order(kernels)
    is_possible = all(max(kernel.after, default=-1) < i for i, kernel in enumerate(kernels))
    if is_possible and peak_bytes(kernels, order, kept) >= peak_bytes(kernels, range(len(kernels)), kept):
        return None
    return order


def saving_order(kernels: Sequence[Kernel[Buffer]]) -> list[int]:
    """Return the positions of ``kernels`` in an order that respects dependencies and keeps few bytes live.

    The order is built from the end. Candidates are the kernels whose readers are all placed. Among these, the next is
    the kernel before which the fewest bytes are live, if that is fewer than after it. Otherwise it is the last kernel
    in the given order, so that related kernels stay together.
    """
    waiting = [0] * len(kernels)
    for kernel in kernels:
        for i in kernel.after:
            waiting[i] += 1
    readers: dict[Buffer, list[int]] = {}
    for i, kernel in enumerate(kernels):
        for name in kernel.reads:
            readers.setdefault(name, []).append(i)
    growth = [sum(kernel.reads.values()) - sum(kernel.makes.values()) for kernel in kernels]
    ready = {i for i, others in enumerate(waiting) if not others}
    by_growth, by_place = [(growth[i], -i) for i in ready], [-i for i in ready]  # may have stale entries
    heapify(by_growth)
    heapify(by_place)
    live: set[Buffer] = set()
    reverse: list[int] = []
    while ready:
        while by_growth[0] != (growth[-by_growth[0][1]], by_growth[0][1]) or -by_growth[0][1] not in ready:
            heappop(by_growth)
        while -by_place[0] not in ready:
            heappop(by_place)
        least, place = by_growth[0]
        chosen = -place if least < 0 else -by_place[0]
        ready.remove(chosen)
        reverse.append(chosen)
        for name in kernels[chosen].reads:
            for i in () if name in live else readers[name]:  # the buffer is now live behind its other readers anyway
                growth[i] -= kernels[i].reads[name]
                if i in ready:
                    heappush(by_growth, (growth[i], -i))
            live.add(name)
        for i in kernels[chosen].after:
            waiting[i] -= 1
            if not waiting[i]:
                ready.add(i)
                heappush(by_growth, (growth[i], -i))
                heappush(by_place, -i)
    assert len(reverse) == len(kernels), "kernels that wait for each other"
    return reverse[::-1]


def peak_bytes(kernels: Sequence[Kernel[Buffer]], order: Sequence[int], kept: Collection[Buffer] = frozenset()) -> int:
    """Return the most bytes that are live at once, workspaces included; buffers in ``kept`` are never freed."""
    last: dict[Buffer, int] = {}
    made: set[Buffer] = set()
    for step, i in enumerate(order):
        last.update(dict.fromkeys(kernels[i].makes, step))
        last.update(dict.fromkeys(kernels[i].reads, step))
        made.update(kernels[i].makes)
    live = peak = sum({n: size for k in kernels for n, size in k.reads.items() if n not in made}.values())
    for step, i in enumerate(order):
        kernel = kernels[i]
        live += sum(kernel.makes.values())
        over = max((kernel.reads[n] for n in kernel.over if n in made and n not in kept and last[n] == step), default=0)
        peak = max(peak, live - over + kernel.workspace)
        for name, size in {**kernel.reads, **kernel.makes}.items():
            if last[name] == step and name not in kept:
                live -= size
    return peak
