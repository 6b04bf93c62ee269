"""What happened while training: promotions, scale changes, fallbacks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One thing worth telling. ``kind`` is "promotion", "scale", "nan", "fallback" or "relowering"."""

    step: int
    kind: str
    site: str
    detail: str
