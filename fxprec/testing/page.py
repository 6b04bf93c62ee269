"""The report of a test session: ``numerics.json`` for programs, ``index.html`` for people."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from fxprec.errors import writing

SCHEMA = 1
_COLUMNS = ("tensor", "module", "source", "numel", "error", "reference_error", "sqnr", "share")
_HEADS = ("tensor", "module", "source", "elements", "error", "reference's", "SQNR, dB", "of what is allowed")
_WIDTH, _HEIGHT = 600, 160  # of a curve, px


def write(folder: Path, tests: Sequence[Mapping[str, Any]]) -> None:
    """Write both files. Raises `ConfigError` if the folder cannot be written."""
    with writing(f"--numerics-report {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        data = {"schema": SCHEMA, "fxprec": metadata.version("fxprec"), "tests": list(tests)}
        (folder / "numerics.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / "index.html").write_text(page(tests), encoding="utf-8")


def page(tests: Iterable[Mapping[str, Any]]) -> str:
    """Return the page, which escapes every name and fetches nothing."""
    body = "".join(_test(test) for test in tests) or "<p>No test used the fixture <code>numerics</code>.</p>"
    frame = resources.files("fxprec.testing").joinpath("page.html").read_text(encoding="utf-8")
    return frame.replace("{{body}}", body)


def _test(test: Mapping[str, Any]) -> str:
    failed = test["outcome"] == "failed"  # one that is skipped or expected to fail is no regression
    name = html.escape(test["test"])
    checks = "".join(map(_check, test["checks"]))
    checks += _WAY_OUT if failed else ""
    opened = " open" if failed else ""
    return f'<details class="{"bad" if failed else "good"}"{opened}><summary>{name}</summary>{checks}</details>\n'


_WAY_OUT = (
    "<p>If the change is meant, <code>pytest --numerics-update</code> rewrites the golden files of the tests run, "
    "where the rules hold.</p>"
)


def _check(check: Mapping[str, Any]) -> str:
    parts = [f"<h2>{html.escape(check['kind'])}: {html.escape(check.get('name', ''))}</h2>"]
    if "message" in check:
        parts.append(f"<pre>{html.escape(check['message'])}</pre>")
    if check.get("rows"):
        parts.append(_table(check["rows"]))
    if "losses" in check:
        parts.append(_curve(check))
    return "".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    worst = sorted(rows, key=lambda row: -_number(row["share"]))
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row[c])}</td>" for c in _COLUMNS) + "</tr>" for row in worst)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    return html.escape(f"{value:.3g}" if isinstance(value, float) else str(value))


def _curve(check: Mapping[str, Any]) -> str:
    """Draw the loss over its band, from the first step on the left to the last step."""
    low, high = ([_number(x) for x in check[name]] for name in ("low", "high"))
    bottom, top = min(low), max(high)
    losses = [min(max(_number(x), bottom), top) for x in check["losses"]]

    def points(values: Iterable[float], *, back: bool = False) -> str:
        steps = list(enumerate(values))
        scale = _WIDTH / max(len(losses) - 1, 1)
        put = [f"{i * scale:.1f},{(top - y) / (top - bottom or 1) * _HEIGHT:.1f}" for i, y in steps]
        return " ".join(reversed(put) if back else put)

    band = f'<polygon points="{points(high)} {points(low, back=True)}"/>'
    line = f'<polyline points="{points(losses)}"/>'
    label = f"loss over {len(losses)} steps, {bottom:.4g} to {top:.4g}, with the band of several seeds"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{band}{line}</svg><p>{label}</p>'


def _number(value: float | str) -> float:
    found = float(value)
    return found if found == found else float("inf")
