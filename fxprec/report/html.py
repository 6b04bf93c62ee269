"""``report.html``: a plan as one self-contained page, nothing fetched, every name inserted as text."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from fxprec.formats import parse
from fxprec.plan import Plan


def write_report(plan: Plan, path: Path, *, title: str) -> None:
    """Write the page. Raises OSError."""
    path.write_text(report_html(plan, title=title), encoding="utf-8")


def report_html(plan: Plan, *, title: str) -> str:
    """Return the page: the same plan and title give the same bytes."""
    page = resources.files("fxprec.report").joinpath("report.html").read_text(encoding="utf-8")
    data = html.escape(json.dumps(_data(plan), allow_nan=False))
    return page.replace("{{title}}", html.escape(title)).replace("{{data}}", data)


def _data(plan: Plan) -> dict[str, Any]:
    return {
        "recipe": plan.recipe.to_dict(),
        "storage": plan.storage,
        "policy": plan.policy,
        "asked": plan.requested_low_ratio if plan.activation_budget is None else f"{plan.activation_budget} bytes",
        "reached": plan.achieved_low_ratio,
        "saved": None if plan.saved_bytes is None else [plan.saved_bytes.fp32, plan.saved_bytes.planned],
        "curve": ratio_curve(plan),
        "groups": [
            {"id": g.id, "low": g.low, "order": g.order, "elements": g.elements, "operators": list(g.operators)}
            for g in plan.groups
        ],
        "sites": [
            [
                s.id,
                s.tensor,
                s.kind,
                s.module,
                s.source,
                s.shape,
                s.group,
                s.format,
                parse(s.format).bits,
                s.promoted_at,
            ]
            for s in plan.sites
        ],
    }


def ratio_curve(plan: Plan) -> list[list[float]]:
    """Return [group, share of all elements low once it and all before it are demoted], in order of demotion."""
    reached, curve = 0, []
    for group in sorted(plan.groups, key=lambda g: g.order):
        reached += group.elements
        curve.append([group.id, round(reached / max(plan.total_elements, 1), 6)])
    return curve
