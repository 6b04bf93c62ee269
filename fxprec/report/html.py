"""``report.html``: a plan as one self-contained page that fetches nothing and inserts every name as text."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from fxprec.plan import Plan
from fxprec.report.drawing import FILE, Drawing
from fxprec.report.history import FILE as STATS
from fxprec.report.history import read_history
from fxprec.report.page_data import page_data
from fxprec.report.tensors import latest, read_tensors

SCRIPTS = (
    "dom.js",
    "base.js",
    "charts.js",
    "peak.js",
    "layout.js",
    "graph.js",
    "detail.js",
    "tables.js",
    "dumped.js",
    "main.js",
)


def write_report(plan: Plan, folder: Path, *, title: str, drawing: Drawing | None = None) -> Path:
    """Write ``report.html`` into a dump folder, with the graph and the statistics found there; return its path.

    The page's title is the model's class with ``title`` beside it, and the recipe. Pass ``drawing`` to avoid reading
    the graph again. Raises OSError, and `PlanError` for a file there that is not whole.
    """
    drawing = drawing or Drawing.load(folder / FILE, plan)
    history = read_history(folder / STATS, len(plan.sites))
    path = folder / "report.html"
    title += ", evaluation" if plan.is_evaluation else ""
    named = f"{plan.model} ({title})" if plan.model else title
    named = f"{named}: {plan.recipe.name}, {plan.storage} storage"
    text = report_html(plan, title=named, drawing=drawing, history=history, dumped=latest(read_tensors(folder)))
    path.write_text(text, encoding="utf-8")
    return path


def report_html(
    plan: Plan,
    *,
    title: str,
    drawing: Drawing | None = None,
    history: Sequence[Mapping[str, object]] = (),
    dumped: Sequence[Mapping[str, object]] = (),
) -> str:
    """Return the page; the same arguments give the same bytes."""
    values = page_data(plan, title, drawing, history) | {"dumped": list(dumped)}
    return framed("page.html", "fxprec", {"title": html.escape(title)}, SCRIPTS, values)


def framed(
    body: str,
    name: str,
    texts: Mapping[str, str],
    scripts: Sequence[str],
    values: Mapping[str, object],
    *,
    styles: Sequence[str] = (),
) -> str:
    """Return a page of this folder in the common frame: ``body`` with each ``{{name}}`` replaced by a text.

    ``texts`` has the page's title; ``values`` is the data that its scripts show.
    """
    data = json.dumps(values, allow_nan=False, separators=(",", ":"))
    parts = {
        "name": name,
        "title": texts["title"],
        "style": "".join(map(_read, ("style.css", *styles))),
        "body": _filled(body, texts),
        "script": "".join(map(_read, scripts)),
        "data": data.replace("<", r"\u003c"),  # in a script element only "<" can end it or start a comment
    }
    return _filled("frame.html", parts)


def _filled(file: str, parts: Mapping[str, str]) -> str:
    """Return a file of this folder with each ``{{name}}`` replaced; inserted text is not searched again."""
    before, *rest = _read(file).split("{{")
    return before + "".join(parts[name] + after for name, _, after in (piece.partition("}}") for piece in rest))


def _read(name: str) -> str:
    return (resources.files("fxprec.report") / "page" / name).read_text(encoding="utf-8")
