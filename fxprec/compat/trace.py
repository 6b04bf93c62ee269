"""torch's structured trace and its debug folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch._dynamo.utils
import torch._inductor.config
import torch._logging._internal


def traces_artifacts() -> bool:
    """Say whether torch's structured trace (``TORCH_TRACE``, read by ``tlparse``) is on."""
    log = torch._logging._internal.trace_log
    return bool(log.handlers) and not log.disabled


def trace_artifact(name: str, encoding: str, payload: str) -> None:
    """Add a file to the structured trace of the compilation under way. ``encoding`` is "string" or "json"."""
    torch._logging._internal.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: payload
    )


def debug_folder() -> str | None:
    """Return where torch writes under ``TORCH_COMPILE_DEBUG=1``, or None where that is not set."""
    return torch._dynamo.utils.get_debug_dir() if torch._inductor.config.trace.enabled else None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Write nothing into torch's structured trace, which would have every graph serialised."""
    log = torch._logging._internal.trace_log
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
