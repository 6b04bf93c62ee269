"""The data that ``report.html`` draws: plain JSON; repeated texts are listed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fxprec.numerics.blocks import find
from fxprec.numerics.formats import parse
from fxprec.plan import Plan, Site
from fxprec.plan.explain import lowering_lines, reasons
from fxprec.plan.rows import LIVE
from fxprec.report.curve import Point, by_group, by_ratio
from fxprec.report.drawing import Drawing, DrawnNode

_WIDTH = {"bfloat16": 16, "float16": 16}


Texts: TypeAlias = Callable[[str], int]
"""Returns the number of a text in the list of all texts."""


def page_data(plan: Plan, title: str, drawing: Drawing | None, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return everything that the page shows of a plan; numbers in table rows index ``texts``."""
    known: dict[str, int] = {}

    def texts(text: str) -> int:
        return known.setdefault(text, len(known))

    points = by_group(plan, None if drawing is None else drawing.damage)
    data = {
        "title": title,
        "fxprec": plan.fxprec,
        "torch": plan.torch,
        "recipe": plan.recipe.to_dict(),
        "storage": plan.storage,
        "policy": plan.policy,
        "grouping": plan.grouping,
        "asked": plan.requested_low_ratio,
        "budget": plan.activation_budget,
        "reached": plan.achieved_low_ratio,
        "elements": plan.total_elements,
        "notes": [*plan.notes, *([] if plan.lowering is None else lowering_lines(plan.lowering))],
        "bits": {name: find(name).bits for name in sorted({s.stored_as for s in plan.sites})},
        "saved": _saved(plan),
        "peak": _peak(plan),
        "groups": [
            [g.id, int(g.low), g.order, g.elements, g.saved_elements, g.saved_bytes, texts(", ".join(g.operators))]
            for g in plan.groups
        ],
        "curve": [_point(p) for p in points],
        "ratios": [_point(p) for p in by_ratio(points)],
        "gemms": _gemms(plan, drawing, texts),
        "sites": [_site(plan, s, texts) for s in plan.sites],
        "nodes": None if drawing is None else [_node(n, texts) for n in drawing.nodes],
        "edges": [] if drawing is None else [i for edge in drawing.edges for i in edge],
        "history": list(history),
    }
    return data | {"texts": list(known)}


def _peak(plan: Plan) -> dict[str, object] | None:
    """Return the live bytes over a step under a peak budget, with the parts that a step budget counts too."""
    peak, whole = plan.peak_bytes, plan.whole_step
    if peak is None:
        return None
    there = [] if whole is None else [whole.weights, whole.states]
    summed = 0 if whole is None else whole.gradients
    more = sum(there) + summed
    sizes = {name: more + getattr(peak, name) for name in ("room", "budget", "high", "planned")}
    points = [
        {"peak": more + p.peak, "seconds": float(f"{p.seconds:.4g}"), "live": _rows(there, summed, p.live)}
        for p in peak.points
    ]
    return sizes | {
        "beside": peak.beside,
        "graphs": peak.graphs,
        "compiled": None if peak.compiled is None else more + peak.compiled,
        "compiledLive": [more + size for size in peak.compiled_live],
        "kinds": [*(() if whole is None else ("weights", "optimizer states")), *LIVE],
        "live": _rows(there, summed, peak.live),
        "points": points,
    }


def _rows(there: Sequence[int], summed: int, live: Sequence[Sequence[int]]) -> list[list[int]]:
    at = LIVE.index("gradients returned")
    return [[*there, *row[:at], row[at] + summed, *row[at + 1 :]] for row in live]


def _saved(plan: Plan) -> dict[str, int] | None:
    """Return the saved bytes: 4 per element in float32, 2 in bf16; masks and indices are not counted."""
    if plan.saved_bytes is None:
        return None
    return {"fp32": plan.saved_bytes.fp32, "bf16": plan.saved_bytes.bf16, "planned": plan.saved_bytes.planned}


def _point(point: Point) -> list[float | None]:
    damage = None if point.damage is None else float(f"{point.damage:.4g}")
    return [point.groups, round(point.reached, 6), point.saved_bytes, float(f"{point.error:.4g}"), damage]


def _site(plan: Plan, s: Site, texts: Texts) -> list[object]:
    where = [texts(t) for t in (s.tensor, s.kind, s.module, s.source, s.shape)]
    why = texts("\n".join(reasons(plan, s)))
    return [*where, s.group, texts(s.stored_as), s.promoted_at, s.elements, why, texts(s.reads)]


def _node(n: DrawnNode, texts: Texts) -> list[Any]:
    where = [texts(t) for t in (n.name, n.op, n.module, n.source, n.value)]
    return [*where, n.group, int(n.backward), n.elements, int(n.saved), list(n.sites)]


def _gemms(plan: Plan, drawing: Drawing | None, texts: Texts) -> list[list[Any]]:
    """Return the rows of the GEMM table. Bytes of operands and result are given twice: all in bf16, and as planned."""
    nodes = () if drawing is None else drawing.nodes
    bits = {n.name: _WIDTH.get(n.value.partition(" ")[0], 32) for n in nodes}
    bits |= {s.tensor: parse(s.format).bits for s in plan.sites if s.kind in ("output", "param")}
    rows = []
    for gemm in plan.gemms:
        cost = None if drawing is None else drawing.gemms[gemm.id]
        numbers: list[int | None] = [None, None, None]
        if cost is not None:
            sizes = [*((nodes[i].name, n) for i, n in cost.operands), (gemm.node, cost.result)]
            planned = sum(bits.get(name, 32) * n for name, n in sizes) // 8
            numbers = [cost.flops, 2 * sum(n for _, n in sizes), planned]
        names = [texts(t) for t in (gemm.node, gemm.op, gemm.module)]
        answer = [gemm.pays, texts(gemm.why), gemm.group_before, gemm.group_after]
        rows.append([*names, *numbers, *answer])
    return rows
