"""`Diagnosis`: the result of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fxprec.diagnosis.advice import Advice
from fxprec.diagnosis.rows import Check, GemmRow, GroupRow, Row
from fxprec.plan.lines import one_line
from fxprec.plan.shown import table
from fxprec.report.result import plain, write_result

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The stored tensors of one training step, by the damage that storing them does. `str` gives a text.

    *Damage* is the root mean square, over the parameters, of the relative L2 error of each parameter's gradient.
    """

    model: str
    loss: float
    """The loss of the step examined."""
    formats: tuple[str, ...]
    """The candidate formats that each tensor was tried in."""
    ranking: tuple[Row, ...]
    """Stored tensors as planned, worst first."""
    groups: tuple[GroupRow, ...]
    """Groups of stored tensors, worst first."""
    gemms: tuple[GemmRow, ...]
    """GEMMs whose operands the recipe rounds to blocks, each re-run alone, worst first."""
    checks: tuple[Check, ...]
    """Groups that were re-run, each with it alone low, worst predicted first."""
    whole: tuple[Check, ...]
    """Re-runs of the whole step: as planned, and as recommended."""
    spearman: float | None
    """Rank correlation of predicted and measured damage over ``checks``; None for fewer than three."""
    advice: Advice
    notes: tuple[str, ...]
    """Limits of the examination, as sentences."""
    seconds: float

    @property
    def recommended(self) -> dict[str, Any]:
        """Options to paste into ``torch.compile(model, backend="fxprec", options=...)``; `advice` gives the reason."""
        return dict(self.advice.options)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, with numbers that are not finite as strings."""
        first = ("model", "loss", "formats", "recommended", "advice", "spearman")
        values = {
            n: plain(getattr(self, n)) for n in (*first, "whole", "checks", "groups", "gemms", "ranking", "notes")
        }
        return {"schema": SCHEMA} | values | {"advice": self.advice.to_dict(), "seconds": round(self.seconds, 2)}

    def save(self, folder: str | Path) -> Path:
        """Write ``diagnosis.json`` and ``diagnosis.html``; return the page. Raises `ConfigError`."""
        from fxprec.diagnosis.page import page

        return write_result(folder, "diagnosis", self.to_dict(), page(self))

    def __repr__(self) -> str:
        worst = f", worst {self.ranking[0].tensor} (damage {self.ranking[0].damage:.2g})" if self.ranking else ""
        found = f"{self.model}, loss {self.loss:.4g}, {len(self.ranking)} stored tensors{worst}"
        return f"<Diagnosis: {one_line(found)}; recommended {self.recommended!r}>"

    def _repr_html_(self) -> str:
        from fxprec.diagnosis.text import SHOWN

        rows = [(r.tensor, r.module or r.source, r.format, f"{r.damage:.2g}", r.reason) for r in self.ranking[:SHOWN]]
        advice = table([("options", repr(self.recommended)), ("why", self.advice.reason)])
        head = f"<b>{escape(self.model)}: loss {self.loss:.6g}, {len(self.ranking)} stored tensors</b>"
        return head + table(rows, ("tensor", "module or line", "format", "damage", "why")) + advice

    def __str__(self) -> str:
        from fxprec.diagnosis.text import text

        return text(self)
