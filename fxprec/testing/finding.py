"""Findings of a check, and the table that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fxprec.plan.lines import aligned, one_line
from fxprec.report.result import plain
from fxprec.testing.measure import Measured

SHOWN = 10  # rows of a table


@dataclass(frozen=True)
class Place:
    """A place in the user's model."""

    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class Row:
    """One tensor of a step, and its allowed error."""

    measured: Measured
    place: Place
    allowed: float
    share: float
    """Error divided by the allowed error."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, with numbers that are not finite as strings."""
        m = self.measured
        numbers = {"error": m.error, "reference_error": m.reference_error, "sqnr": m.sqnr, "gain": m.gain}
        numbers |= {"allowed": self.allowed, "share": self.share}
        return {"tensor": m.name, "numel": m.numel, **asdict(self.place), **plain(numbers)}


@dataclass(frozen=True)
class Finding:
    """One difference. ``tensor`` in brackets is not a tensor: ``(plan)``, ``(options)``."""

    tensor: str
    place: Place
    text: str
    severity: float = 1.0
    """Orders findings; 1 is at the limit."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"tensor": self.tensor, **asdict(self.place), "text": self.text, "severity": plain(self.severity)}


def table(findings: Sequence[Finding], rows: Sequence[Row]) -> str:
    """Return a headline, the changes of options and plan, and the worst tensors with their errors against float64."""
    worst = sorted(findings, key=lambda f: -f.severity)
    about = [f for f in worst if f.tensor.startswith("(")]
    tensors = [f for f in worst if not f.tensor.startswith("(")]
    first = f"numerics differ: {len(findings)} findings, the worst {one_line((tensors or about)[0].tensor)}"
    lines = [f"{f.tensor[1:-1]}: {one_line(f.text)}" for f in about[:SHOWN]] + _rest(about)
    return "\n".join([first, *lines, *([_tensor_table(tensors, rows)] if tensors else []), *_rest(tensors)])


def _tensor_table(findings: Sequence[Finding], rows: Sequence[Row]) -> str:
    by_name = {row.measured.name: row.measured for row in rows}
    lines = [("tensor", "module", "source", "error", "reference's", "dB", "what")]
    for f in findings[:SHOWN]:
        m = by_name.get(f.tensor)
        numbers = ("", "", "") if m is None else (f"{m.error:.2e}", f"{m.reference_error:.2e}", f"{m.sqnr:.1f}")
        lines.append((f.tensor, f.place.module, f.place.source, *numbers, f.text))
    return aligned(lines)


def _rest(findings: Sequence[Finding]) -> list[str]:
    return [f"... and {len(findings) - SHOWN} more"] if len(findings) > SHOWN else []
