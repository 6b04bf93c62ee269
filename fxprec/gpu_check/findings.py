"""Findings of an item's process as plain data. They are written after every case, so they survive a crash."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Findings:
    """The findings of one item in one mode."""

    item: str
    mode: str
    passed: list[str] = field(default_factory=list)
    """Names of the cases that passed."""
    failed: list[dict[str, str]] = field(default_factory=list)
    """``case``, ``why`` (one line) and ``detail`` (a traceback, or nothing)."""
    left_out: list[dict[str, str]] = field(default_factory=list)
    """``what`` was not checked, and ``why``."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Values that were measured or read, by name."""
    refused: str = ""
    """The reason why fxprec has no code for this machine."""
    case: str = ""
    """Name of the current case."""
    has_ended: bool = False
    seconds: float = 0.0
    processor_seconds: float = 0.0
    output: str = ""
    """The end of what a failed process printed."""

    @property
    def status(self) -> str:
        """``"failed"``, ``"passed"``, or ``"skipped"`` if there was nothing to check."""
        if self.failed or self.refused:
            return "failed"
        return "passed" if self.passed else "skipped"

    def fail(self, case: str, why: str, detail: str = "") -> None:
        """Record a case that failed."""
        self.failed.append({"case": case, "why": why, "detail": detail})

    def write(self, path: Path) -> None:
        """Replace the file atomically, so that a reader never sees a part of it."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(path)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, the status included."""
        return {"status": self.status, **asdict(self)}

    @classmethod
    def read(cls, path: Path, item: str, mode: str) -> Findings:
        """Return what a process has written so far; empty findings if it has written nothing yet."""
        if not path.exists():
            return cls(item, mode)
        return cls(**json.loads(path.read_text(encoding="utf-8")))
