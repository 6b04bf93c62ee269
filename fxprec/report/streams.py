"""Two runs side by side: where their tensors' statistics part first, joined by tensor and module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fxprec.errors import PlanError
from fxprec.plan import Plan, Site
from fxprec.report.history import FILE, rows_of
from fxprec.report.load import plans_of

RATIO = 0.01  # shares of elements that over- or underflow: a larger difference is one
Point = tuple[float, float, float]
"""amax, overflow ratio, underflow ratio."""
Series = Mapping[int, Mapping[int, Point]]
"""By site, then by step; of a site's several casts the first."""


@dataclass(frozen=True)
class Parting:
    """One tensor whose statistics are another's from a step on."""

    graph: str
    site: Site
    """Of the first run."""
    other: Site
    step: int
    what: str
    """Of the statistics: ``"amax"``, ``"overflow"`` or ``"underflow"``."""
    ours: float
    theirs: float

    @property
    def order(self) -> tuple[int, str, tuple[bool, int]]:
        """Sorts by step, then by execution."""
        return (self.step, self.graph, self.site.order)


@dataclass(frozen=True)
class Comparison:
    """What two dumps have in common, and where they part."""

    joined: int
    """Tensors found in both, with statistics of the same steps."""
    steps: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differences: tuple[str, ...]
    """The first thing in which the models of each graph differ."""
    partings: tuple[Parting, ...]
    """Each tensor once, where it parts first; in the order of steps, then of execution."""


def compare_runs(a: Path, b: Path, tolerance: float = 0.1) -> Comparison:
    """Compare what two dump folders recorded while training.

    ``tolerance`` is relative, of the largest magnitudes. Raises `PlanError` for a folder without statistics, and for
    runs of different models.
    """
    ours, theirs = plans_of(a), plans_of(b)
    partings, steps = list[Parting](), set[int]()
    missing: tuple[list[str], list[str]] = ([], [])
    differences = list[str]()
    joined = 0
    for name in (n for n in ours if n in theirs):
        pairs = list(_pairs(ours[name], theirs[name]))
        differs = ours[name].first_difference(theirs[name], there="the second")
        differences += [f"{name}: {differs}" if name else differs] if differs else []
        _note_missing(missing, name, ours[name], theirs[name], pairs)
        left, right = _series(a, name, ours[name]), _series(b, name, theirs[name])
        for site, other in pairs:
            common = sorted(left.get(site.id, {}).keys() & right.get(other.id, {}).keys())
            joined += bool(common)
            steps.update(common)
            found = next(_differences(name, site, other, common, left, right, tolerance), None)
            partings += [] if found is None else [found]
    _refuse_strangers(a, b, ours, theirs, joined)
    ordered = tuple(sorted(partings, key=lambda p: p.order))
    return Comparison(joined, len(steps), tuple(missing[0]), tuple(missing[1]), tuple(differences), ordered)


def _pairs(a: Plan, b: Plan) -> Iterator[tuple[Site, Site]]:
    """Yield the sites of both: of the same tensor and kind, or the n-th of that kind in the same module."""
    by_tensor = {(s.tensor, s.kind, s.module): s for s in b.sites}
    by_place = {_place(b, s): s for s in b.sites}
    for site in a.sites:
        other = by_tensor.get((site.tensor, site.kind, site.module)) or by_place.get(_place(a, site))
        if other is not None:
            yield site, other


def _place(plan: Plan, site: Site) -> tuple[str, str, int]:
    before = sum(s.module == site.module and s.kind == site.kind for s in plan.sites[: site.id])
    return site.module, site.kind, before


def _note_missing(
    missing: tuple[list[str], list[str]], graph: str, a: Plan, b: Plan, pairs: list[tuple[Site, Site]]
) -> None:
    for names, plan, seen in ((missing[0], a, {s.id for s, _ in pairs}), (missing[1], b, {s.id for _, s in pairs})):
        names += [f"{s.tensor} ({s.kind}{f', {s.module}' if s.module else ''})" for s in plan.sites if s.id not in seen]


def _series(root: Path, graph: str, plan: Plan) -> Series:
    found: dict[int, dict[int, Point]] = {}
    first: dict[int, int] = {}  # the row of a site's first cast
    for row in rows_of((root / graph if graph else root) / FILE, len(plan.sites)):
        if first.setdefault(row["site"], row["row"]) == row["row"]:
            point = (row["amax"], row["overflow_ratio"], row["underflow_ratio"])
            found.setdefault(row["site"], {})[row["step"]] = point
    return found


def _differences(
    graph: str, site: Site, other: Site, steps: list[int], left: Series, right: Series, tolerance: float
) -> Iterator[Parting]:
    for step in steps:
        ours, theirs = left[site.id][step], right[other.id][step]
        for what, x, y, limit in zip(
            ("amax", "overflow", "underflow"), ours, theirs, (tolerance * abs(ours[0]), RATIO, RATIO), strict=True
        ):
            if what != "amax" and (site.stored_as != other.stored_as or math.isnan(x) != math.isnan(y)):
                continue  # of another format, or not counted in one of the runs
            if _is_apart(x, y, limit if tolerance else 0.0):
                yield Parting(graph, site, other, step, what, x, y)


def _is_apart(x: float, y: float, limit: float) -> bool:
    if math.isfinite(x) and math.isfinite(y):
        return abs(x - y) > limit
    return not (x == y or (math.isnan(x) and math.isnan(y)))


def _refuse_strangers(a: Path, b: Path, ours: Mapping[str, Plan], theirs: Mapping[str, Plan], joined: int) -> None:
    """Raise where nothing can be compared, and say why."""
    if joined:
        return
    for root, plans in ((a, ours), (b, theirs)):
        if not any((root / name / FILE).exists() for name in plans):
            raise PlanError(
                f"{root}: holds no {FILE}, so nothing trained there; train with options={{'dump': DIR}}, then compare"
            )
    if not set(ours) & set(theirs):
        raise PlanError(
            f"{a} holds {', '.join(ours)} and {b} {', '.join(theirs)}: no graph of one name; give two folders that "
            "dump= named"
        )
    modules = [sorted({s.module for p in plans.values() for s in p.sites if s.module}) for plans in (ours, theirs)]
    raise PlanError(
        f"{a} and {b} recorded no tensor of one name in the same step (modules {', '.join(modules[0][:3])} and "
        f"{', '.join(modules[1][:3])}); give two runs of one model, both with on_nonfinite='report', which watches all"
    )
