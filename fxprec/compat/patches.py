"""Optional patches of torch, for speed or for warnings; a patch is skipped if torch lacks a private name it needs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch

from fxprec.compat.versions import NEWEST_TORCH, OLDEST_TORCH, words
from fxprec.errors import FxprecWarning

Patch: TypeAlias = Callable[..., AbstractContextManager[None]]

_told = set[str]()
_lock = threading.Lock()


def optional(module: str, name: str, lost: str) -> Patch:
    """Return the context manager ``name`` of ``module``, which is imported when the context is entered.

    If torch lacks a private name that the context manager needs, entering does nothing but warn of what is ``lost``.
    Exceptions of the body are passed on.
    """

    @contextmanager
    def patched(*args: object, **options: object) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(getattr(importlib.import_module(module), name)(*args, **options))
            except (ImportError, AttributeError) as error:
                tell_of_missing(error, lost)
            yield

    return patched


def tell_of_missing(cause: object, lost: str) -> None:
    """Warn once per process that torch lacks a private name."""
    with _lock:
        is_new = lost not in _told
        _told.add(lost)
    if is_new:
        versions = f"torch {words(OLDEST_TORCH)} to {words(NEWEST_TORCH)}"
        warnings.warn(
            f"torch {torch.__version__} lacks a private name that fxprec uses ({cause}): {lost}; install a newer "
            f"fxprec, or {versions}",
            FxprecWarning,
            stacklevel=3,
        )


_INHERITED = object()
_left: dict[object, object] = {}  # by replacement that ended before a later one: what it had replaced


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of torch by ``make(old)`` inside the context; restore it unless it was replaced again.

    Contexts of two threads may end in either order: the attribute is restored when the last one ends.
    """
    before = vars(owner).get(name, _INHERITED)
    made = make(getattr(owner, name))
    if isinstance(inspect.getattr_static(owner, name), staticmethod) and not isinstance(made, staticmethod):
        made = staticmethod(made)
    setattr(owner, name, made)
    try:
        yield
    finally:
        with _lock:
            if vars(owner).get(name) is made:
                _restore(owner, name, before)
            else:
                _left[made] = before


def _restore(owner: object, name: str, before: object) -> None:
    while before in _left:
        before = _left.pop(before)
    if before is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
