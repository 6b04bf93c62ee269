"""AOTAutograd's settings, and what autograd's engine is doing on this thread."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator

import torch
import torch._functorch.config
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _CheckpointFrame

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


below_autograd: Callable[[], contextlib.AbstractContextManager[object]] = torch._C._AutoDispatchBelowADInplaceOrView
"""Within it operators record nothing: no graph, and not that their result is a view."""


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Compile the backward half with the forward half and let its errors out; else the first backward meets them."""
    name = "force_non_lazy_backward_lowering"
    with torch._functorch.config.patch({name: True} if hasattr(torch._functorch.config, name) else {}):
        yield


def inputs_written_behind(joint: Graph) -> list[Node]:
    """Return the inputs of a traced step that AOTAutograd writes into once forward has run: what they hold then is one
    of the results.
    """
    results = pytree.arg_tree_leaves(joint.output_node().meta.get("desc", ()))
    written = [d.mutated_input for d in results if isinstance(d, InputMutationAOTOutput)]
    return [node for node in joint.find_nodes(op="placeholder") if node.meta.get("desc") in written]


def in_backward() -> bool:
    """Say whether autograd is running a backward pass on this thread: a forward is then a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_id() -> int:
    """Return the number of the backward pass under way, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def checkpoint_around() -> tuple[object, Hashable | None] | None:
    """Return what stands for the non-reentrant checkpoint around a call, and which recomputation of it this is.

    The same object in forward, where the second is None, and in recomputation. None outside of such a checkpoint.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    code, cells = getattr(pack, "__code__", None), getattr(pack, "__closure__", None)
    if code is None or cells is None:
        return None
    known = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    if isinstance(known.get("frame"), _CheckpointFrame):
        return known["frame"], None
    frame = known["target_frame_ref"]() if "target_frame_ref" in known else None
    return None if frame is None else (frame, known["gid"])
