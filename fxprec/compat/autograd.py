"""AOTAutograd's settings, and the state of autograd's engine on this thread."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch._functorch.config
import torch.utils.checkpoint
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxprec.compat.versions import NEWEST_TORCH, OLDEST_TORCH, words
from fxprec.errors import LoweringError

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


below_autograd: Callable[[], contextlib.AbstractContextManager[object]] = torch._C._AutoDispatchBelowADInplaceOrView
"""Inside this context operators record no autograd graph, and do not mark their result as a view."""


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Compile the backward half together with the forward half, so that errors do not wait for the first backward."""
    name = "force_non_lazy_backward_lowering"
    with torch._functorch.config.patch({name: True} if hasattr(torch._functorch.config, name) else {}):
        yield


def inputs_written_behind(joint: Graph) -> list[Node]:
    """Return the inputs of a joint graph that AOTAutograd overwrites with a result after forward has run."""
    results = pytree.arg_tree_leaves(joint.output_node().meta.get("desc", ()))
    written = [d.mutated_input for d in results if isinstance(d, InputMutationAOTOutput)]
    return [node for node in joint.find_nodes(op="placeholder") if node.meta.get("desc") in written]


def in_backward() -> bool:
    """Return whether autograd is running a backward pass on this thread, so that a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def take_donated() -> tuple[int, ...]:
    """Return the inputs that the backward half just compiled may overwrite, and clear AOTAutograd's list of them.

    With a non-empty list AOTAutograd refuses ``backward(retain_graph=True)``. With an empty list fxprec must pass
    copies of these inputs in that case (`keeps_graph`).
    """
    context = torch._guards.TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if not donated:
        return ()
    taken = tuple(donated)
    donated.clear()  # in place, because several of AOTAutograd's records share the list
    return taken


def keeps_graph() -> bool:
    """Return whether the current backward pass must not modify saved tensors, because another pass may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


CHECKED = "fxprec checks the backward pass here; compile it without fullgraph=True"
"""What Dynamo says where it must trace such a hook."""


def on_gradient(of: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook`` with the gradient of a tensor. Dynamo does not trace the hook if it compiles the backward call."""
    of.register_hook(torch.compiler.disable(hook, reason=CHECKED))


def backward_id() -> int:
    """Return the number of the current backward pass, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def checkpoint_around() -> tuple[object, Hashable | None] | None:
    """Return the non-reentrant checkpoint around a call, and the id of the current recomputation.

    The first object is the same in forward and in recomputations; the second is None in forward. Returns None outside
    of such a checkpoint. Raises `LoweringError` if torch implements checkpoints in an unknown way, because a
    recomputation could then run with newer scales than its forward.
    """
    return next((found for pack in _saving() if (found := _checkpoint_of(pack)) is not None), None)


def _saving() -> Iterator[Callable[..., object]]:
    """Yield the hooks that pack saved tensors, the innermost first; a checkpoint's hook may not be the innermost."""
    autograd, taken = torch._C._autograd, []
    try:
        while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
            yield inspect.unwrap(hooks[0])
            taken.append(hooks)
            autograd._pop_saved_tensors_default_hooks()
    finally:
        for hooks in reversed(taken):
            autograd._push_saved_tensors_default_hooks(*hooks)


def _checkpoint_of(pack: Callable[..., object]) -> tuple[object, Hashable | None] | None:
    code, cells = getattr(pack, "__code__", None), getattr(pack, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    known = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    frame_type = getattr(torch.utils.checkpoint, "_CheckpointFrame", None)
    if frame_type is not None and isinstance(known.get("frame"), frame_type):
        return known["frame"], None
    if "target_frame_ref" in known and "gid" in known:
        frame = known["target_frame_ref"]()
        return None if frame is None else (frame, known["gid"])
    if getattr(pack, "__module__", "") != torch.utils.checkpoint.__name__:
        return None
    raise LoweringError(
        f"torch {torch.__version__} keeps a checkpoint in a way that this fxprec does not know ({', '.join(names)}), "
        f"and a recomputation could run with newer scales than its forward; install a newer fxprec, or torch "
        f"{words(OLDEST_TORCH)} to {words(NEWEST_TORCH)}, or checkpoint inside of the compiled module"
    )


def hand_on_sources(copy: GraphModule, gm: GraphModule) -> None:
    """Copy Dynamo's names of a graph's inputs to a copy of the graph, for AOTAutograd.

    Without these names AOTAutograd reports no parameter or buffer as a static input. CUDA graphs would then copy each
    weight in each forward, and would skip a graph that writes to a buffer.
    """
    if not hasattr(gm, "_param_name_to_source"):
        return
    copy._param_name_to_source = gm._param_name_to_source
    pairs = zip(copy.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="placeholder"), strict=True)
    for node, named in pairs:
        node._dynamo_source = getattr(named, "_dynamo_source", None)


def without_source(node: Node) -> Node:
    """Mark an input as unknown to Dynamo, because AOTAutograd reads each input's name, and return the input."""
    node._dynamo_source = None
    return node


without_torch_function: Any = torch._C._disabled_torch_function_impl
"""A tensor subclass's ``__torch_function__`` that does not wrap results."""


def will_run(node: torch.autograd.graph.Node) -> bool:
    """Return whether the current backward pass will run an autograd node. Raises `RuntimeError` in autograd.grad()."""
    return bool(torch._C._will_engine_execute_node(node))
