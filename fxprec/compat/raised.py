"""What an exception of a traced model is about: the error behind Dynamo's, and the user's line."""

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

_WRAPPED = "Dynamo failed to run FX node"  # torch 2.15 has an exception of the user's type beside its own


def cause_of(error: BaseException) -> BaseException:
    """Return the error that Dynamo met while it traced, such as a shape mismatch; any other exception itself."""
    found = error
    while type(found).__module__.startswith("torch._dynamo") or str(found).startswith(_WRAPPED):
        behind = found.__cause__ or found.__context__
        if behind is None:
            return error
        found = behind
    return found


def users_line(error: BaseException) -> str:
    """Return ``"model.py:12"``, the user's line that Dynamo was tracing, or that raised; ``""`` if none is known."""
    traced: traceback.StackSummary | None = getattr(error, "real_stack", None)
    stack = traced or traceback.extract_tb(cause_of(error).__traceback__)
    lines = [frame for frame in stack if _is_the_users(frame.filename)]
    return f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""


def _is_the_users(file: str) -> bool:
    """Say whether a file is neither torch's, fxprec's nor Python's own; another package's is a user's."""
    return not file.startswith(_NOT_THE_USERS) and (not file.startswith(_LIBRARY) or file.startswith(_PACKAGES))


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a page of traceback for an operator that fake tensors refuse: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was
