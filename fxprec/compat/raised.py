"""What an exception of a traced model is about: the error behind Dynamo's, and the user's line."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)


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


def traced_line(error: BaseException) -> str:
    """Return ``"model.py:12"``, the line of the user's that Dynamo was tracing; ``""`` where no line is known."""
    stack: traceback.StackSummary = getattr(error, "real_stack", None) or traceback.StackSummary()
    lines = [frame for frame in stack if not frame.filename.startswith(_TORCH)]
    return f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a page of traceback for an operator that fake tensors refuse: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was
