"""A diagnosis as one self-contained page in the report's style: it fetches nothing and escapes every name."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fxprec.diagnosis.adjoint import combined
from fxprec.diagnosis.rows import Row
from fxprec.diagnosis.text import first_groups, free_groups, megabytes, modules
from fxprec.report.html import framed
from fxprec.report.result import plain

if TYPE_CHECKING:
    from fxprec.diagnosis.diagnosis import Diagnosis

SCRIPTS = ("dom.js", "tables.js", "diagnosis.js")
SHADES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Damages at which a cell of the heat map gets darker."""


def page(found: Diagnosis) -> str:
    """Return the page; the same diagnosis gives the same bytes."""
    texts = {
        "title": html.escape(found.model),
        "head": f"loss {found.loss:.6g}, {len(found.ranking)} stored tensors, {len(found.groups)} groups",
        "advice": _advice(found),
        "first": _first(found),
        "checks": _checks(found),
        "notes": "".join(f"<li>{html.escape(note)}</li>" for note in found.notes) or "<li>Nothing.</li>",
    }
    tables = {
        "formats": found.formats,
        "shades": SHADES,
        "heat": _heat(found),
        "ranking": [_row(row) for row in found.ranking],
    }
    return framed("diagnosis.html", "fxprec doctor", texts, SCRIPTS, plain(tables), styles=["diagnosis.css"])


def _advice(found: Diagnosis) -> str:
    a = found.advice
    options = html.escape(f'torch.compile(model, backend="fxprec", options={found.recommended!r})')
    sizes = " &middot; ".join(
        f"{name} {megabytes(number)}"
        for name, number in (
            ("all high", a.bytes_all_high),
            ("as planned", a.bytes_as_planned),
            ("as recommended", a.bytes_recommended),
        )
    )
    return f"<pre>{options}</pre><p>{html.escape(a.reason)}.</p><p class=hint>Stored for backward: {sizes}.</p>"


def _first(found: Diagnosis) -> str:
    worst = [(g.name, modules(g), _number(g.damage)) for g in first_groups(found.groups)]
    free = [(g.name, modules(g), _number(g.damage)) for g in free_groups(found.groups)]
    heads = ("group", "modules", "damage")
    first = "Keep high first" if found.advice.holds_high else "Most of the damage, still within the tolerance"
    return f"<h3>{first}</h3>{_table(heads, worst)}<h3>Free</h3>{_table(heads, free)}"


def _heat(found: Diagnosis) -> list[dict[str, object]]:
    """Return each module's damages, as planned and in each format, in execution order."""
    by_module: dict[str, list[Row]] = {}
    for row in sorted(found.ranking, key=lambda r: (r.graph, r.site)):
        by_module.setdefault(row.module or row.source or "(no module)", []).append(row)
    return [
        {"module": module, "damages": [_short(damage) for damage in _damages(rows, found.formats)]}
        for module, rows in by_module.items()
    ]


def _damages(rows: Sequence[Row], formats: Sequence[str]) -> list[float]:
    in_formats = [combined(r.costs[f].damage for r in rows) for f in formats]
    return [combined(r.damage for r in rows), *in_formats]


def _checks(found: Diagnosis) -> str:
    rows = [
        (
            c.name,
            _number(c.predicted),
            _number(c.measured),
            f"{c.predicted_progress:+.2%}",
            f"{c.measured_progress:+.2%}",
        )
        for c in (*found.checks, *found.whole)
    ]
    heads = ("re-run", "damage predicted", "measured", "progress predicted", "measured")
    ranks = "" if found.spearman is None else f"<p>Spearman {found.spearman:.3f} over {len(found.checks)} groups.</p>"
    return ranks + _table(heads, rows)


def _row(row: Row) -> dict[str, object]:
    p = row.planned
    place = {"tensor": row.tensor, "module": row.module, "source": row.source, "format": row.format, "why": row.reason}
    shares = {"error": p.error, "overflow": p.overflow, "underflow": p.underflow, "zeros": p.zeros}
    return place | {name: _short(value) for name, value in ({"damage": row.damage} | shares).items()}


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else "<p class=hint>None.</p>"


def _number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else str(value)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
