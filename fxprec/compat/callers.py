"""Find torch's objects on the call stack: the wrapper of a named backend, Dynamo's tracer, Dynamo's DDP optimizer."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TypeVar

import torch
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback
from torch._dynamo.output_graph import OutputGraph

_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_\d+")
T = TypeVar("T")


def calling_wrapper() -> object | None:
    """Return the ``torch.compile(backend="...")`` wrapper that is calling a named backend, or None."""
    return next(_callers(torch._TorchCompileWrapper), None)


def traced_model() -> str:
    """Return the class of the module that Dynamo is tracing, or the name of a function that has no module.

    Returns "" outside of Dynamo. For a function with several modules among its locals, the first one counts.
    """
    for graph in _callers(OutputGraph):
        tracer = graph.root_tx
        module = next((x for x in tracer.f_locals.values() if isinstance(x, torch.nn.Module)), None)
        if module is not None:
            return type(module).__name__
        name = tracer.f_code.co_qualname.rpartition("<locals>.")[2]
        return _RESUMED.sub(r"\1", name).removesuffix(".forward")
    return ""


def _callers(kind: type[T]) -> Iterator[T]:
    """Yield the objects of a class whose methods are on the call stack, the innermost first.

    ``f_locals`` is read only for matching frames. For other frames Python would keep a copy of the locals, such as the
    user's first batch, while the function runs. Code objects are compared by identity, because code that Dynamo wrote
    may contain a slice, which Python 3.11 cannot hash.
    """
    codes = {id(code) for name in vars(kind) if (code := getattr(getattr(kind, name), "__code__", None))}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if id(frame.f_code) in codes and isinstance(found := frame.f_locals.get("self"), kind):
            yield found
        frame = frame.f_back


def ends_in_break(gm: torch.fx.GraphModule) -> bool:
    """Return whether a graph ends in a graph break, so that other graphs follow."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


class TraceAgain(RestartAnalysis, ShortenTraceback):
    """Exception on which Dynamo traces the frame again; as a `ShortenTraceback` it passes Dynamo's backend call."""

    def __init__(self, reason: str) -> None:
        Exception.__init__(self, reason)
        self.restart_reason, self.first_useful_frame = reason, None


def widen_ddp_buckets() -> bool:
    """Return whether Dynamo's DDP optimizer is passing a piece of a graph; if so, stop it from cutting this graph.

    The caller must then raise `TraceAgain`, so that the whole graph comes. Each frame has its own optimizer.
    """
    for optimizer in _callers(DDPOptimizer):
        cut = len(optimizer.buckets) > 1
        optimizer.bucket_bytes_cap = optimizer.first_bucket_cap = sys.maxsize
        return cut
    return False
