"""What a pass did, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PassReport:
    """What one pass did: seconds, and operator counts that changed (``aten.mul 12 -> 9``)."""

    name: str
    seconds: float
    changed: dict[str, tuple[int, int]] = field(default_factory=dict)
