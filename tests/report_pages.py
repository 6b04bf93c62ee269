"""A made-up plan of any size, its drawing and its statistics: a chain of groups with shortcuts."""

from __future__ import annotations

import random
from typing import Any

from fxprec.config.recipes import FP8
from fxprec.plan import ByteCount, Gemm, Group, KindCounts, Plan, Site
from fxprec.report.drawing import Drawing, DrawnNode, GemmCost

ELEMENTS = 3_145_728  # of every tensor
SHAPE = "8 x 512 x 768"


def made_up(groups: int, nodes: int, name: str = "t", stored: int = 2) -> tuple[Plan, Drawing, list[dict[str, Any]]]:
    """Return ``groups`` groups of ``nodes`` nodes each, the second half of them backward; every third group is low.

    In each group ``stored`` nodes are, the first and the last among them; the first of group 1 was promoted at step 7.
    """
    rng, half = random.Random(0), nodes // 2
    places = {round(i * (nodes - 1) / (stored - 1)) for i in range(stored)}
    sites: list[Site] = []
    drawn: list[DrawnNode] = []
    edges = [(i, i + 1) for i in range(groups * nodes - 1) if (i + 1) % nodes]
    edges += [(i - rng.randint(2, 4), i) for i in range(groups * nodes) if i % nodes > 4]
    edges += [(g * nodes, (g + 1) * nodes) for g in range(groups - 1)] + [
        (g * nodes, (g + 3) * nodes) for g in range(groups - 3)
    ]
    for i in range(groups * nodes):
        group, place = divmod(i, nodes)
        where: dict[str, Any] = {"module": f"layers.{group}.{name}", "source": f"{name}.py:{group}", "group": group}
        if place in places:
            sites.append(_site(len(sites), f"{name}{i}", place > 0, where))
        drawn.append(
            DrawnNode(
                name=f"{name}{i}",
                op="aten.mm.default",
                backward=place >= half,
                value=f"float32 {SHAPE}",
                elements=ELEMENTS,
                saved=place == 0,
                sites=(len(sites) - 1,) if place in places else (),
                **where,
            )
        )
    tables = tuple(_group(g) for g in range(groups))
    plan = Plan(
        sites=tuple(sites),
        groups=tables,
        gemms=tuple(
            Gemm(
                id=g,
                node=f"{name}{(g + 1) * nodes}",
                op="aten.mm",
                module=f"layers.{g}",
                group_before=g,
                group_after=g + 1,
            )
            for g in range(groups - 1)
        ),
        recipe=FP8,
        total_elements=2 * ELEMENTS * groups,
        saved_bytes=ByteCount(fp32=4 * ELEMENTS * groups, planned=sum(g.saved_bytes or 0 for g in tables)),
        requested_low_ratio=0.3,
        achieved_low_ratio=sum(g.low for g in tables) / groups,
    )
    costs = tuple(GemmCost(10**12, ((g * nodes, ELEMENTS),), ELEMENTS) for g in range(groups - 1))
    return plan, Drawing(tuple(drawn), tuple(edges), costs), [_history(s.id, rng) for s in sites]


def _site(number: int, tensor: str, backward: bool, where: dict[str, Any]) -> Site:
    promoted = where["group"] == 1 and not backward
    low = where["group"] % 3 == 0
    return Site(
        id=number,
        tensor=tensor,
        kind="grad_output" if backward else "output",
        shape=SHAPE,
        format=("e5m2_sat" if backward else "e4m3fn") if low else "bf16",
        direction="backward" if backward else "forward",
        promoted_at=7 if promoted else None,
        elements=ELEMENTS,
        **where,
    )


def _group(number: int) -> Group:
    low = number % 3 == 0
    return Group(
        id=number,
        elements=2 * ELEMENTS,
        elements_by_kind=KindCounts(output=ELEMENTS, grad_output=ELEMENTS),
        low=low,
        order=number,
        operators=("mm", "relu"),
        saved_bytes=ELEMENTS * (1 if low else 2),
        saved_elements=ELEMENTS,
    )


def _history(site: int, rng: random.Random) -> dict[str, Any]:
    steps = list(range(0, 400, 20))
    shares = [rng.random() for _ in steps]
    return {
        "row": site,
        "site": site,
        "steps": steps,
        "amax": shares,
        "overflow": [0.0] * 20,
        "underflow": shares,
        "scale": None,
    }
