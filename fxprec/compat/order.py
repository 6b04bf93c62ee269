"""The order in which Inductor runs its kernels, and when it frees what they read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from torch._inductor import config, custom_graph_pass, memory
from torch._inductor.codegen import cpp
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import FusedSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet


class Ordered(Protocol):
    """Orders kernels, given ``(makes, reads, after)`` of each: bytes by buffer, and positions; ``kept`` stay live.

    Returns None where no order is better than the one given.
    """

    def __call__(
        self, kernels: Sequence[tuple[dict[str, int], dict[str, int], frozenset[int]]], kept: frozenset[str]
    ) -> list[int] | None: ...


class _KernelOrder(getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)):  # type: ignore[misc]
    """Orders Inductor's kernels before it fuses them, and lets no fusion undo that."""

    def __init__(self, ordered: Ordered, key: str, before: Callable[[list[Any]], list[Any]] | None) -> None:
        self.ordered, self.key, self.before = ordered, key, before

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if self.before is not None:
            nodes = self.before(nodes)
        scheduler: Any = V.graph.scheduler
        kept = OrderedSet(V.graph.get_output_names())
        if any(isinstance(node, FusedSchedulerNode) for node in nodes):  # of foreach operators; has no such dependency
            return nodes
        memory.prepare_planning_info(
            nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, OrderedSet(V.graph.graph_inputs), kept
        )
        at = {node: i for i, node in enumerate(nodes)}
        order = self.ordered([_as_kernel(node, at) for node in nodes], frozenset(kept))
        if order is None:
            return nodes
        scheduler.nodes = ordered = [nodes[i] for i in order]
        _chain(ordered, kept)
        scheduler.compute_ancestors()
        return ordered

    def __deepcopy__(self, memo: dict[int, Any]) -> _KernelOrder:
        return self

    def uuid(self) -> Any:
        return (self.key, None if self.before is None else self.before.uuid())  # type: ignore[attr-defined]


def _as_kernel(node: Any, at: Mapping[Any, int]) -> tuple[dict[str, int], dict[str, int], frozenset[int]]:
    makes = {b.get_name(): int(b.mpi_buffer.size_alloc) for b in node.get_outputs() if not _is_on_host(b)}
    reads = {b.get_name(): int(b.mpi_buffer.size_free) for b in node.mpi_node.pred_buffers if not _is_on_host(b)}
    return makes, reads, frozenset(at[n] for n in node.mpi_node.pred_nodes)


def _is_on_host(buffer: Any) -> bool:
    """Say whether a GPU's graph has a buffer in host memory."""
    made: Any = getattr(buffer, "node", None) or V.graph.graph_inputs.get(buffer.get_name())
    device = made.get_device() if hasattr(made, "get_device") else None
    return device is not None and device.type == "cpu" and len(V.graph.device_types - {"cpu", "meta"}) > 0


def _chain(nodes: Sequence[Any], kept: Collection[str]) -> None:
    """Let each kernel wait for the GEMM, or the large result, before it: a fusion across one would undo the order."""
    last = None
    for node in nodes:
        if last is not None:
            node.add_fake_dep(WeakDep(last, node.get_name(), is_fake=True))
        size = sum(b.mpi_buffer.size_alloc for b in node.get_outputs())
        is_result = size >= _LARGE and all(b.get_name() in kept for b in node.get_outputs())
        if is_result or (size and node.is_extern()):
            last = node.get_outputs()[0].get_name()


_LARGE = 1 << 16
"""Bytes of a result worth a kernel of its own."""


@contextlib.contextmanager
def saving_memory(ordered: Ordered, key: str) -> Iterator[None]:
    """Have Inductor run kernels in an order of ours, each by itself, and free each buffer after its last reader.

    It would keep freed buffers for later ones of their size, and call successive C++ loops as one function, with the
    results of all allocated before and the operands of all freed after it (torch 2.13). ``key`` names what ``ordered``
    does, for Inductor's code cache.
    """
    loops: Any = cpp.CppScheduling
    orders = hasattr(memory, "prepare_planning_info") and "is_fake" in {f.name for f in fields(WeakDep)}
    if not orders or not hasattr(loops, _LOOPS):
        yield
        return
    at_once = getattr(loops, _LOOPS)
    order = _KernelOrder(ordered, key, config._pre_fusion_custom_pass)
    setattr(loops, _LOOPS, 0)
    try:
        with config.patch({"allow_buffer_reuse": False, "_pre_fusion_custom_pass": order}):
            yield
    finally:
        setattr(loops, _LOOPS, at_once)


_LOOPS = "MAX_FUSED_KERNEL_ARGS_NUM"
