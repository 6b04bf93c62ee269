"""One picture: per paper and table the first claim, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.papers import catalog, svg
from benchmarks.papers.claims import STATES, Claim, Verdict

COLOURS = {"holds": "#2e7d32", "not shown": "#b8860b", "fails": "#c62828"}
WIDTH, LINE = 1060, 19
CLAIM_X, RESULT_X, MOST = 160, 790, 108


def overview(judged: Mapping[str, Sequence[tuple[Claim, Verdict]]]) -> str:
    """The picture as SVG."""
    parts, y = [], 26
    for key, paper in catalog.PAPERS.items():
        mine = [name for name in judged if name.startswith(f"{key}.")]
        if not mine:
            continue
        parts.append(svg.text(16, y, f"{paper.title} ({paper.source})", font_weight="bold"))
        y += LINE
        for name in mine:
            parts.extend(_line(name, judged[name], y))
            y += LINE
        y += 8
    counts = {state: sum(v.state == state for rows in judged.values() for _, v in rows) for state in STATES}
    parts.append(svg.text(16, y, ", ".join(f"{state}: {n}" for state, n in counts.items() if n), font_weight="bold"))
    return svg.page(WIDTH, y + 14, parts)


def _line(name: str, judged: Sequence[tuple[Claim, Verdict]], y: int) -> Iterator[str]:
    yield svg.text(28, y, name, fill="#555555")
    if not judged:
        yield svg.text(CLAIM_X, y, "no claim to hold against: other hardware", fill="#555555")
        return
    claim = judged[0][0].sentence
    yield svg.text(CLAIM_X, y, claim if len(claim) <= MOST else claim[: MOST - 1].rsplit(" ", 1)[0] + " …")
    for i, (_, verdict) in enumerate(judged):
        x, colour = RESULT_X + 15 * i, COLOURS[verdict.state]
        yield f'<rect x="{x}" y="{y - 9}" width="11" height="11" rx="2" fill="{colour}"/>'
    state = judged[0][1].state
    yield svg.text(RESULT_X + 15 * len(judged) + 4, y, state, fill=COLOURS[state])
