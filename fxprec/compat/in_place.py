"""Compile modules of torch's own classes in place: ``nn.Sequential(...).compile(backend="fxprec")``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType

from torch._dynamo import eval_frame, external_utils, trace_rules
from torch.nn import Module

from fxprec.compat.backends import innermost_backend
from fxprec.compat.patches import replaced


@contextmanager
def torchs_modules_in_place(is_ours: Callable[[object], bool]) -> Iterator[None]:
    """Let ``module.compile()`` compile a module whose ``forward`` is torch's own code, for backends that are ours.

    Dynamo compiles no frame of torch's code, and before torch 2.14 ``module.compile()`` gave it no other frame.
    """
    if hasattr(eval_frame.OptimizedModule, "_should_wrap_module_call_impl"):  # torch 2.14 gives Dynamo a frame
        yield
        return
    compile_function = eval_frame.OptimizeContext.__call__

    def compile_in_frame(self: eval_frame.OptimizeContext, function: Callable[..., object]) -> object:
        if _runs_torchs_forward(function) and is_ours(innermost_backend(self.callback)):
            function = external_utils.wrap_inline(function)
        return compile_function(self, function)

    with replaced(eval_frame.OptimizeContext, "__call__", lambda _: compile_in_frame):
        yield


def _runs_torchs_forward(function: object) -> bool:
    owner = function.__self__ if isinstance(function, MethodType) else None
    if not isinstance(owner, Module) or function.__func__ is not Module._call_impl:  # type: ignore[attr-defined]
        return False
    return bool(trace_rules.check(owner.forward))
