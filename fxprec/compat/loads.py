"""Adjust Inductor's limits on how much one kernel may read and compute."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from torch._inductor import config, scheduler
from torch._inductor.dependencies import MemoryDep


@contextlib.contextmanager
def only_tensors_are_loads(scaled: bool) -> Iterator[None]:
    """Raise Inductor's limits on a kernel, so that reads of scales and the operators that decode codes do not count.

    Above these limits Inductor writes a value with several readers to memory. ``scaled``: the graph reads scales, which
    exceed the limit of reads, so a float32 gradient would be written before each norm. Decoding exceeds the limit of
    operators, so GELU's gradient would be written in float32 beside its bfloat16 copy for GEMMs.
    """
    reads = config.realize_reads_threshold + (_SCALES if scaled else 0)
    operators = max(config.realize_opcount_threshold or 0, _OPERATORS)
    with _inner_values_are_no_loads(), config.patch(realize_reads_threshold=reads, realize_opcount_threshold=operators):
        yield


_SCALES = 4
_OPERATORS = 60  # twice Inductor's limit: a dozen operators decode a code, once per reader in GELU's backward


@contextlib.contextmanager
def _inner_values_are_no_loads() -> Iterator[None]:
    """Patch Inductor to count only outside loads of a kernel that reduces over rows and columns, not its own values.

    The limit (10, since torch 2.13) saves registers. Unpatched, the limit also counts buffers that are written and read
    only inside of the kernel. So some of fxprec's counts were not fused with a gradient and its bias's sum; masks of
    every element were written and read again for these counts.
    """
    reductions = getattr(scheduler, "FusedMixOrderReductions", None)
    most = getattr(config.triton, _LIMIT, 0)
    if reductions is None or most <= 0:
        yield
        return
    can_fuse_with = reductions.can_fuse_with

    def can_fuse_within_loads(self: Kernel, other: Kernel, *args: object, **kwargs: object) -> bool:
        if len(_loads([*self.get_nodes(), *other.get_nodes()])) > most:
            return False
        with config.patch({f"triton.{_LIMIT}": 0}):
            return bool(can_fuse_with(self, other, *args, **kwargs))

    reductions.can_fuse_with = can_fuse_within_loads
    try:
        yield
    finally:
        reductions.can_fuse_with = can_fuse_with


def _loads(nodes: list[Kernel]) -> set[str]:
    made = {name for node in nodes for name in node.get_buffer_names()}
    reads = itertools.chain.from_iterable(node.read_writes.reads for node in nodes)
    return {dep.name for dep in reads if isinstance(dep, MemoryDep)} - made


Kernel = scheduler.BaseSchedulerNode
_LIMIT = "mix_order_reduction_max_reads"
