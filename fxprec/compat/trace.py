"""Write to torch's structured trace, and find its debug folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch._dynamo.utils
import torch._inductor.config
import torch._logging._internal


def traces_artifacts() -> bool:
    """Return whether torch's structured trace (``TORCH_TRACE``, read by ``tlparse``) is on."""
    log = torch._logging._internal.trace_log
    return bool(log.handlers) and not log.disabled


def trace_artifact(name: str, encoding: str, payload: str) -> None:
    """Add a file to the structured trace of the current compilation. ``encoding`` is "string" or "json"."""
    torch._logging._internal.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: payload
    )


def debug_folder() -> str | None:
    """Return the folder that torch writes to under ``TORCH_COMPILE_DEBUG=1``, or None if that is not set."""
    return torch._dynamo.utils.get_debug_dir() if torch._inductor.config.trace.enabled else None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Switch torch's structured trace off inside the context, because it would serialise every graph."""
    log = torch._logging._internal.trace_log
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
