"""Watch the errors that Dynamo suppresses under ``torch._dynamo.config.suppress_errors``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._dynamo import convert_frame
from torch._dynamo.exc import Unsupported, UserError

from fxprec.compat.backends import cause_of_no_code, innermost_backend
from fxprec.compat.frames import named, owner_of
from fxprec.compat.patches import replaced
from fxprec.errors import FxprecError

if TYPE_CHECKING:
    from torch._C._dynamo.eval_frame import _PyInterpreterFrame as Frame
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.types import ConvertFrameReturn as Converted


class _Kept(threading.local):
    error: FxprecError | None = None
    """fxprec's error of the frame that this thread compiles."""


@contextmanager
def suppressed_errors(tell: Callable[[object, str, object, str], None]) -> Iterator[None]:
    """Raise fxprec's errors in spite of the suppression, and call ``tell(backend, code, owner, reason)`` for others.

    Dynamo runs a frame uncompiled where compiling it failed, and says so only in its log.
    """
    kept = _Kept()
    compile_frame: Callable[..., Converted] = convert_frame.ConvertFrameAssert.__call__
    convert: Callable[..., Converted] = convert_frame.ConvertFrame.__call__

    def compile_and_watch(self: ConvertFrameAssert, frame: Frame, *args: object, **options: object) -> Converted:
        try:
            return compile_frame(self, frame, *args, **options)
        except FxprecError as error:
            kept.error = error
            raise
        except (Unsupported, UserError):  # `frames_left_uncompiled` tells of these
            raise
        except Exception as error:
            if torch._dynamo.config.suppress_errors and not self._one_graph:
                reason = cause_of_no_code(error) or str(error).partition("\n")[0]
                try:
                    tell(
                        innermost_backend(self._torchdynamo_orig_backend), named(frame.f_code), owner_of(frame), reason
                    )
                except FxprecError as told:
                    kept.error = told
            raise

    def convert_and_raise(self: object, *args: object, **options: object) -> Converted:
        before, kept.error = kept.error, None
        try:
            result = convert(self, *args, **options)
            if kept.error is not None:
                raise kept.error
            return result
        finally:
            kept.error = before

    with (
        replaced(convert_frame.ConvertFrameAssert, "__call__", lambda _: compile_and_watch),
        replaced(convert_frame.ConvertFrame, "__call__", lambda _: convert_and_raise),
    ):
        yield
