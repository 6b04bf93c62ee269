"""Find the error behind an exception of Dynamo, and the user's line that caused it."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")  # "<": generated code
_LIBRARY = sysconfig.get_path("stdlib")
_PACKAGES = os.path.join(_LIBRARY, "site-packages")

_WRAPPED = "Dynamo failed to run FX node"  # torch 2.15 may wrap an error in an exception of the same type


def cause_of(error: BaseException) -> BaseException:
    """Return the error behind one of Dynamo's exceptions, such as a shape mismatch; other exceptions unchanged."""
    found = error
    while type(found).__module__.startswith("torch._dynamo") or str(found).startswith(_WRAPPED):
        behind = found.__cause__ or found.__context__
        if behind is None:
            return error
        found = behind
    return found


def users_line(error: BaseException) -> str:
    """Return the user's line that Dynamo was tracing or that raised, as ``"model.py:12"``; ``""`` if unknown."""
    traced: traceback.StackSummary | None = getattr(error, "real_stack", None)
    stack = traced or traceback.extract_tb(cause_of(error).__traceback__)
    lines = [frame for frame in stack if _is_the_users(frame.filename)]
    return f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""


def _is_the_users(file: str) -> bool:
    """Return whether a file is the user's: not torch's, fxprec's or Python's own. Other packages are the user's."""
    return not file.startswith(_NOT_THE_USERS) and (not file.startswith(_LIBRARY) or file.startswith(_PACKAGES))


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a long traceback if an operator refuses fake tensors: the error has the same facts."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was
