"""Caches texts on disk beside Inductor's code: printing the codec takes a tenth of a second per process."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch

from fxprec.numerics.native import inductor


def kept(name: str, text: Callable[[], str]) -> str:
    """Return ``text()``, from disk if it was kept for the same sources of `fxprec.numerics`."""
    found = read(name)
    if found is None:
        found = text()
        keep(name, found)
    return found


def read(name: str) -> str | None:
    """Return the text kept under a name; None if there is none, or if it is damaged."""
    with contextlib.suppress(OSError, UnicodeError):
        known, _, digest = _path(name).read_text(encoding="utf-8").rpartition("\n")
        if digest == _digest(known):
            return known
    return None


def keep(name: str, text: str) -> None:
    """Keep a text under a name for other processes, if the folder can be written."""
    with contextlib.suppress(OSError):
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")  # another process may write the same text
        own.write_text(f"{text}\n{_digest(text)}", encoding="utf-8")
        own.replace(path)


def _path(name: str) -> Path:
    return Path(inductor().cache_folder(), "fxprec", f"{name}-{_sources()}.txt")


def _sources() -> str:
    texts = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return _digest(torch.__version__ + "\0".join(hashlib.sha256(text).hexdigest() for text in texts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
