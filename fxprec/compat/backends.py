"""Backends inside of Dynamo: the wrappers around them, their registration by name, and their errors."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch._dynamo
from torch._dynamo.backends import registry
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback


def wrapper_of(compiled: object) -> object | None:
    """Return the backend callable, or torch's wrapper of a backend's name, inside a result of ``torch.compile``."""
    return innermost_backend(_callback(compiled))


def _callback(compiled: object) -> object | None:
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled  # a module after module.compile()
    context = getattr(compiled, "dynamo_ctx", None)  # a compiled module
    if context is not None:
        return getattr(context, "callback", None)
    for cell in getattr(compiled, "__closure__", None) or ():  # a compiled function
        if hasattr(cell.cell_contents, "_torchdynamo_orig_backend"):
            result: object | None = cell.cell_contents
            return result
    return None


def hear_resets(backend: object) -> None:
    """Let ``torch.compiler.reset()`` call ``backend.reset()``, once: a reset forgets all backends."""
    torch._dynamo.eval_frame.cached_backends.setdefault(id(backend), backend)  # type: ignore[arg-type]


def innermost_backend(target: object) -> object:
    """Return the backend inside of Dynamo's wrappers."""
    while (inner := getattr(target, "_torchdynamo_orig_backend", None)) is not None:
        target = inner
    return target


def cause_of_no_code(error: Exception) -> str | None:
    """Return the first line of a backend's error that kept a function from being compiled, or None for other errors."""
    return str(error.inner_exception).partition("\n")[0] if isinstance(error, BackendCompilerFailed) else None


def name_backend(backend: Callable[..., Any], name: str) -> bool:
    """Register a backend with torch under a name; return False if the name is taken."""
    if name in torch._dynamo.list_backends(exclude_tags=()):
        return False
    torch._dynamo.register_backend(backend, name=name)
    return True


def is_looking_up_a_backend() -> bool:
    """Return whether torch is loading a backend's entry point because the backend was requested by name."""
    frame = sys._getframe(1)
    for _ in range(6):  # frames of the entry point itself are in between
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is getattr(registry.lookup_backend, "__code__", None):
            return True
    return False


_loaded: dict[str, object] = {}
"""The entry points of backends that torch has loaded and removed from its own table."""
_lock = threading.Lock()


def one_at_a_time(name: str, patience: float = 1.0) -> None:
    """Wait until no other thread is between loading the backend ``name`` and registering it.

    torch has no lock there. If two threads load the entry point, the second one's registration fails with "duplicate
    name". So the second thread waits here for the first registration, then removes it and registers again.
    """
    with _lock:
        end = time.monotonic() + patience
        while name in _loaded and name not in _table("_COMPILER_FNS") and time.monotonic() < end:
            time.sleep(0.001)
        forget_name(name)
        entry = _table("_BACKENDS").get(name)
        if entry is not None:
            _loaded[name] = entry


def forget_name(name: str) -> None:
    """Make torch load the entry point ``name`` again the next time the name is used."""
    entry = _loaded.pop(name, None)
    if entry is not None:
        _table("_BACKENDS")[name] = entry  # add first, so that a concurrent lookup always finds one entry
        _table("_COMPILER_FNS").pop(name, None)


def _table(name: str) -> dict[str, object]:
    return getattr(registry, name, {})


def through_dynamo(error: Exception) -> Exception:
    """Return ``error`` as a type that Dynamo passes on; Dynamo wraps other types in ``BackendCompilerFailed``.

    The result is also an instance of the error's own type, so ``except fxprec.ConfigError`` works. The caller must
    raise it: Dynamo removes its frames from the traceback down to the caller's (``TORCHDYNAMO_VERBOSE=1`` shows all).
    """
    kind = type(error)
    message = str(error)  # fixed here, because Dynamo appends its debugging advice to args
    told = {"frame_exec_strategy": None, "apply_to_code": True}  # Dynamo asks its own errors, where it suppresses them
    space = {"__module__": kind.__module__, "__str__": lambda self: message, **told}
    passing = type(kind.__name__, (kind, ShortenTraceback), space)
    raised: Exception = passing.__new__(passing, *error.args)
    raised.args = error.args
    raised.__dict__.update(error.__dict__)
    raised.first_useful_frame = sys._getframe(1)  # type: ignore[attr-defined]
    return raised
