"""Estimate launches, bytes outside GEMMs and seconds of a lowered half on a GPU, without generating its code.

`python -m benchmarks.gpu.roofline` counts these in the code that Inductor generates; docs/gemm.md reports the
differences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch.fx import Graph

from fxprec.passes.analysis.gemm_costs import Costs
from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.traffic.fusion import Kernels
from fxprec.passes.analysis.traffic.nodes import Memory


@dataclass(frozen=True)
class Traffic:
    """Launches and bytes of one half, GEMMs and attention left out."""

    launches: int
    bytes: int

    def seconds(self, costs: Costs) -> float:
        """Return the seconds on a device, assuming that nothing overlaps."""
        return self.launches * costs.launch_s + self.bytes / costs.bytes_per_s


def traffic_of(graph: Graph) -> Traffic:
    """Estimate the launches and the bytes of a lowered half."""
    memory = Memory(graph)
    launches = moved = 0
    for kernel in [*Kernels(memory).groups(), *_library_calls(memory)]:
        launches += 1 + any(memory.is_split(p) for p in kernel)
        moved += _read(memory, kernel) + _written(memory, kernel)
    return Traffic(launches, moved)


def _library_calls(memory: Memory) -> Iterable[set[int]]:
    """Yield each call of a library's or fxprec's own kernel, with the pieces of its result."""
    for position, item in enumerate(memory.items):
        if item.kind is Kind.EXTERN and not memory.is_gemm(position):
            readers = memory.loops.readers[position]
            yield {position, *(r for r in readers if memory.items[r].kind is Kind.PIECE)}


def _read(memory: Memory, kernel: Collection[int]) -> int:
    """Return the bytes that a kernel reads from other kernels' tensors, at most each tensor's size."""
    pieces: dict[int, dict[str, int]] = {}
    for position in kernel:
        for read in memory.reads[position].values():
            if read.base not in kernel:
                pieces.setdefault(read.base, {})[read.piece] = read.bytes
    return sum(min(sum(found.values()), memory.items[base].bytes) for base, found in pieces.items())


def _written(memory: Memory, kernel: Collection[int]) -> int:
    """Return the bytes of a kernel's results that other kernels read."""
    return sum(memory.items[p].bytes for p in kernel if _leaves(memory, p, kernel))


def _leaves(memory: Memory, position: int, kernel: Collection[int]) -> bool:
    item, loops = memory.items[position], memory.loops
    if item.kind in (Kind.EXTERN, Kind.PIECE) or item.is_stored or loops.returned[position]:
        return True
    return any(not _is_inside(memory, reader, kernel) for reader in loops.readers[position])


def _is_inside(memory: Memory, position: int, kernel: Collection[int]) -> bool:
    """Return whether a kernel contains a reader; for a reader without a buffer, whether it contains all its readers."""
    if memory.is_in_memory(position):
        return position in kernel
    return all(_is_inside(memory, reader, kernel) for reader in memory.loops.readers[position])
