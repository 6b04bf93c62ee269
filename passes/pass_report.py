"""The report of one pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch


@dataclass(frozen=True)
class PassReport:
    """The time that one pass took in seconds, and the operator counts that it changed (``aten.mul 12 -> 9``)."""

    name: str
    seconds: float
    changed: dict[str, tuple[int, int]] = field(default_factory=dict)


@lru_cache(maxsize=1024)
def target_text(target: object) -> str:
    """Return an operator's name: ``aten.mm.default``, ``getitem``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name: str = getattr(target, "__name__", type(target).__name__)
    return name
