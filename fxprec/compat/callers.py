"""Who in torch is calling: a string-named backend's wrapper, Dynamo's tracer, Dynamo's DDP optimizer."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback
from torch._dynamo.output_graph import OutputGraph

_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_\d+")


def calling_wrapper() -> object | None:
    """Return the ``torch.compile(backend="...")`` wrapper that is calling the string-named backend."""
    return next(_callers(torch._TorchCompileWrapper), None)


def traced_model() -> str:
    """Return the class of the module that Dynamo is tracing, or the name of a function without one.

    Returns "" outside of Dynamo. A function that is handed several modules has the class of the first.
    """
    for graph in _callers(OutputGraph):
        tracer = graph.root_tx
        module = next((x for x in tracer.f_locals.values() if isinstance(x, torch.nn.Module)), None)
        if module is not None:
            return type(module).__name__
        name = tracer.f_code.co_qualname.rpartition("<locals>.")[2]
        return _RESUMED.sub(r"\1", name).removesuffix(".forward")
    return ""


def _callers(kind: type) -> Iterator[Any]:
    """Yield the objects of a class whose methods are calling, the innermost first.

    Other frames are not asked for their locals: Python would keep a copy of them, a user's first batch among them,
    for as long as the function runs. Code is compared by identity: what Dynamo wrote may hold a slice, which Python
    3.11 cannot hash.
    """
    codes = {id(code) for name in vars(kind) if (code := getattr(getattr(kind, name), "__code__", None))}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if id(frame.f_code) in codes and isinstance(found := frame.f_locals.get("self"), kind):
            yield found
        frame = frame.f_back


def ends_in_break(gm: torch.fx.GraphModule) -> bool:
    """Say whether Dynamo ended a graph because it could not go on, so that the rest is in others."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


class TraceAgain(RestartAnalysis, ShortenTraceback):
    """Asks Dynamo to trace the frame once more; of these two types, it lets one pass and acts on the other."""

    def __init__(self, reason: str) -> None:
        Exception.__init__(self, reason)
        self.restart_reason, self.first_useful_frame = reason, None


def widen_ddp_buckets() -> bool:
    """Say whether Dynamo's DDP optimizer is calling us with a piece of a graph; if so, it cuts this one no more.

    Raise `TraceAgain` then: the second time the graph comes whole. Each frame has an optimizer of its own.
    """
    for optimizer in _callers(DDPOptimizer):
        cut = len(optimizer.buckets) > 1
        optimizer.bucket_bytes_cap = optimizer.first_bucket_cap = sys.maxsize
        return cut
    return False
