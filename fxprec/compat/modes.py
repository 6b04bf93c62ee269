"""Watch calls inside of a torch dispatch mode, such as `FlopCounterMode`, where Dynamo compiles nothing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import convert_frame, trace_rules
from torch.utils import _python_dispatch

from fxprec.compat.backends import innermost_backend
from fxprec.compat.frames import RUN_ONLY, named
from fxprec.compat.patches import replaced

if TYPE_CHECKING:
    from torch._C._dynamo.eval_frame import _PyInterpreterFrame as Frame
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.types import ConvertFrameReturn as Converted

_ASKS_FOR_FRAME = "frame" in inspect.signature(trace_rules.check).parameters  # torch 2.11 does not


@contextmanager
def calls_inside_modes(tell: Callable[[object, str, str], bool]) -> Iterator[None]:
    """Call ``tell(backend, code, mode)`` for a frame that Dynamo would compile but for a dispatch mode.

    Dynamo marks such code to run uncompiled for good. Where ``tell`` returns True, this call alone runs uncompiled.
    """
    convert: Callable[..., Converted] = convert_frame.CatchErrorsWrapper.__call__

    def convert_and_watch(self: CatchErrorsWrapper, frame: Frame, *args: object, **options: object) -> Converted:
        mode = _skipping_mode()
        if mode is None or torch._dynamo.config.disable or _is_never_compiled(frame):
            return convert(self, frame, *args, **options)
        is_ours = tell(innermost_backend(self._torchdynamo_orig_backend), named(frame.f_code), mode)
        return RUN_ONLY if is_ours else convert(self, frame, *args, **options)

    with replaced(convert_frame.CatchErrorsWrapper, "__call__", lambda _: convert_and_watch):
        yield


def _is_never_compiled(frame: Frame) -> bool:
    """Return whether Dynamo skips a frame anyway, or the frame is one of Python's library, which computes nothing."""
    library = str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names - {"__main__"}
    options: dict[str, Any] = {"frame": frame} if _ASKS_FOR_FRAME else {}
    return library or bool(trace_rules.check(frame.f_code, **options))


def _skipping_mode() -> str | None:
    """Return the name of a mode inside which Dynamo skips frames, or None."""
    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        if not mode.is_infra_mode() and not getattr(mode, "ignore_compile_internals", bool)():
            return type(mode).__name__
    return None
