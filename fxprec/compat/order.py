"""Control the order in which Inductor runs its kernels, and when it frees their operands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._inductor import config, custom_graph_pass, memory
from torch._inductor.codegen import cpp
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.fx_passes import post_grad
from torch._inductor.ir import FallbackKernel, MultiOutput
from torch._inductor.scheduler import FusedSchedulerNode, SchedulerBuffer
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._ordered_set import OrderedSet

from fxprec.compat.patches import replaced, tell_of_missing

if TYPE_CHECKING:
    from torch._inductor.memory import FreeableInputBuffer
    from torch._inductor.scheduler import BaseSchedulerNode as Scheduled

    Buffer = SchedulerBuffer | FreeableInputBuffer

OrderedKernel = tuple[dict[str, int], dict[str, int], frozenset[int], Node | None, frozenset[str]]


class Ordered(Protocol):
    """A function that orders kernels, each given as ``(makes, reads, after, call, over)``.

    ``makes`` and ``reads`` map buffers to bytes; ``after`` has the positions of earlier kernels; ``call`` is the node
    that a library computes, or None for a loop, which writes its result into a buffer of ``over`` that nothing reads
    later. Buffers in ``kept`` stay live.
    """

    def __call__(self, kernels: Sequence[OrderedKernel], kept: frozenset[str]) -> list[int] | None:
        """Return the indices of kernels in their new order, or None if the given order should stay."""


class _KernelOrder(getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)):  # type: ignore[misc]
    """An Inductor pass that orders kernels before fusion, and prevents fusions that would undo the order."""

    def __init__(
        self,
        ordered: Ordered,
        key: str,
        before: Callable[[list[Scheduled]], list[Scheduled]] | None,
        in_place: Collection[OpOverload] = (),
    ) -> None:
        self.ordered, self.key, self.before, self.in_place = ordered, key, before, in_place

    def __call__(self, nodes: list[Scheduled]) -> list[Scheduled]:
        if self.before is not None:
            nodes = self.before(nodes)
        scheduler = V.graph.scheduler
        kept = OrderedSet(V.graph.get_output_names())
        if any(isinstance(node, FusedSchedulerNode) for node in nodes):  # foreach operators: `_chain` cannot order them
            return nodes
        memory.prepare_planning_info(
            nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, OrderedSet(V.graph.graph_inputs), kept
        )
        kernels = _with_pieces(nodes)
        at = {node: i for i, pieces in enumerate(kernels) for node in pieces}
        found = self._held_back([_as_kernel(pieces, at) for pieces in kernels], kernels)
        order = self.ordered(found, frozenset(kept))
        places = range(len(kernels)) if order is None else order
        scheduler.nodes = ordered = [node for i in places for node in kernels[i]]
        _chain(ordered, kept)
        scheduler.compute_ancestors()
        return ordered

    def _held_back(self, found: Sequence[OrderedKernel], kernels: Sequence[Sequence[Scheduled]]) -> list[OrderedKernel]:
        """Make each kernel depend on ``in_place`` calls just before it: a memory-saving order would put these last."""
        calls = [any(getattr(n.node, "op_overload", None) in self.in_place for n in pieces) for pieces in kernels]
        ahead, held = set[int](), list[OrderedKernel]()
        for i, (makes, reads, after, call, over) in enumerate(found):
            held.append((makes, reads, after if calls[i] else after | ahead, call, over))
            ahead = ahead | {i} if calls[i] else set()
        return held

    def __deepcopy__(self, memo: object) -> _KernelOrder:
        return self

    def uuid(self) -> object:
        return (self.key, None if self.before is None else self.before.uuid())  # type: ignore[attr-defined]


def _with_pieces(nodes: Sequence[Scheduled]) -> list[list[Scheduled]]:
    """Return each kernel followed by the nodes that extract its results, which are all allocated at once."""
    kernels: list[list[Scheduled]] = []
    kernel_of: dict[Scheduled, list[Scheduled]] = {}
    for node in nodes:
        before = list(node.mpi_node.pred_nodes)
        is_piece = isinstance(node.node, MultiOutput) and len(before) == 1
        kernel_of[node] = kernel_of[before[0]] if is_piece else []
        if not is_piece:
            kernels.append(kernel_of[node])
        kernel_of[node].append(node)
    return kernels


def _as_kernel(nodes: Sequence[Scheduled], at: Mapping[Scheduled, int]) -> OrderedKernel:
    makes, reads, after = dict[str, int](), dict[str, int](), set[int]()
    for node in nodes:
        makes |= {b.get_name(): _bytes(b) for b in node.get_outputs() if not _is_on_host(b) and _owner(b) is b}
        read = [_owner(b) for b in node.mpi_node.pred_buffers if not _is_on_host(b)]
        reads |= {b.get_name(): _bytes(b) for b in read}
        after |= {at[n] for n in node.mpi_node.pred_nodes}
    others = {name: size for name, size in reads.items() if name not in makes}
    call = nodes[0].node.get_origin_node() if nodes[0].is_extern() and nodes[0].node is not None else None
    return makes, others, frozenset(after - {at[nodes[0]]}), call, frozenset(_over(nodes[0]))


def _over(node: Scheduled) -> Iterator[str]:
    """Yield the buffers over which a loop may write its result: `decide_inplace_update` asks the same."""
    made = node.get_outputs()
    if node.is_extern() or len(made) != 1 or not made[0].mpi_buffer.size_alloc:
        return
    for buffer in node.mpi_node.pred_buffers:
        users = [user for user in getattr(buffer, "users", None) or () if user.node is node]
        is_aligned = bool(users) and all(user.can_inplace for user in users)
        if isinstance(buffer, SchedulerBuffer) and is_aligned and _is_as_large(buffer, made[0]):
            yield buffer.get_name()


def _is_as_large(buffer: SchedulerBuffer, other: SchedulerBuffer) -> bool:
    same_bytes: bool = buffer.mpi_buffer.size_alloc == other.mpi_buffer.size_alloc
    return same_bytes and buffer.node.get_dtype() is other.node.get_dtype()


def _bytes(buffer: Buffer) -> int:
    """Return the bytes that are freed with a buffer; 0 if the buffer is a view of an input."""
    made = getattr(buffer, "node", None)
    while isinstance(made, MultiOutput):
        (made,) = made.inputs
    shown = made.get_inputs_that_alias_output() if isinstance(made, FallbackKernel) else ()
    return 0 if any(name in V.graph.graph_inputs for name in shown) else int(buffer.mpi_buffer.size_free)


def _owner(buffer: Buffer) -> Buffer:
    """Return the buffer that owns a buffer's memory, which is another one if a call returns its argument."""
    made: object = getattr(buffer, "node", None)
    shown = made.get_inputs_that_alias_output() if type(made) is FallbackKernel else ()
    others = V.graph.scheduler.name_to_buf
    return _owner(others[shown[0]]) if len(shown) == 1 and shown[0] in others else buffer


def _is_on_host(buffer: Buffer) -> bool:
    """Return whether a buffer of a GPU's graph is in host memory."""
    made: Any = getattr(buffer, "node", None) or V.graph.graph_inputs.get(buffer.get_name())
    device = made.get_device() if hasattr(made, "get_device") else None
    return device is not None and device.type == "cpu" and len(V.graph.device_types - {"cpu", "meta"}) > 0


def _chain(nodes: Sequence[Scheduled], kept: Collection[str]) -> None:
    """Make each kernel depend on the last GEMM or large result before it, as fusing across it would undo the order.

    A GEMM also depends on the reductions before it. Otherwise Inductor fuses one with a reduction of a later layer, and
    all that it reads lives until then.
    """
    last, reduced, is_extern = None, list[str](), False
    for node in nodes:
        # A second dependency on a buffer would keep a loop from writing over it.
        if last is not None and not (is_extern and last in node.read_writes.buffer_names()):
            node.add_fake_dep(WeakDep(last, node.get_name(), is_fake=True))
        size = sum(b.mpi_buffer.size_alloc for b in node.get_outputs())
        is_result = size >= _LARGE and all(b.get_name() in kept for b in node.get_outputs())
        if is_result or (size and node.is_extern()):
            for name in reduced:
                node.add_fake_dep(WeakDep(name, node.get_name(), is_fake=True))
            last, reduced, is_extern = node.get_outputs()[0].get_name(), [], node.is_extern()
        elif node.is_reduction():
            reduced.append(node.get_outputs()[0].get_name())


_LARGE = 1 << 16
"""Bytes from which a result gets its own kernel."""


@contextlib.contextmanager
def saving_memory(ordered: Ordered, key: str, in_place: Collection[OpOverload] = ()) -> Iterator[None]:
    """Make Inductor run kernels in the order of ``ordered``, one by one, and free each buffer after its last reader.

    Unpatched, Inductor reuses freed buffers for later ones of equal size. It also calls successive C++ loops as one
    function, allocating all results before it and freeing all operands after it (torch 2.13). ``key`` identifies
    ``ordered`` for Inductor's code cache. Calls of ``in_place`` stay before the kernel that follows them.
    """
    loops: object = cpp.CppScheduling
    orders = hasattr(memory, "prepare_planning_info") and "is_fake" in {f.name for f in fields(WeakDep)}
    if not orders or not hasattr(loops, _LOOPS):
        yield
        return
    at_once = getattr(loops, _LOOPS)
    order = _KernelOrder(ordered, key, config._pre_fusion_custom_pass, in_place)
    setattr(loops, _LOOPS, 0)
    try:
        with (
            config.patch({"allow_buffer_reuse": False, "_pre_fusion_custom_pass": order}),
            _freeing_tangents(),
            _adding_late(),
        ):
            yield
    finally:
        setattr(loops, _LOOPS, at_once)


def _freeing_tangents() -> contextlib.AbstractContextManager[None]:
    """Count a gradient that backward receives as freed after its last reader, as the generated code frees it.

    torch 2.13 counts it as live to the end, so an order that frees it early seems no better than one that does not.
    """
    if not hasattr(memory, _KEPT):
        tell_of_missing(_KEPT, "a gradient that backward receives may be freed late")
        return contextlib.nullcontext()
    return replaced(memory, _KEPT, lambda is_kept: lambda dep: is_kept(dep) and not dep.name.startswith("tangents"))


def _adding_late() -> contextlib.AbstractContextManager[None]:
    """Leave a product and a sum apart if the sum's other operand is computed after the product.

    Inductor would compute both at once, as addmm, where the sum is. The product's factors would wait until then.
    """
    if not hasattr(post_grad, _APART):
        tell_of_missing(_APART, "a product may wait for what it is added to, at a higher peak")
        return contextlib.nullcontext()
    return replaced(post_grad, _APART, lambda prefers: lambda match: prefers(match) or _would_wait(match))


def _would_wait(match: Any) -> bool:
    addend = match.kwargs.get("inp")
    return any(node.target is torch.ops.aten.mm.default and node < addend for node in match.nodes)


_APART = "should_prefer_unfused_addmm"
_LOOPS = "MAX_FUSED_KERNEL_ARGS_NUM"
_KEPT = "is_nonfreeable_buffers"
