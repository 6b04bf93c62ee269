"""Compare two runs: match their tensors by name and module, and find where they first differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxprec.errors import PlanError
from fxprec.plan import Plan
from fxprec.report.history import FILE
from fxprec.report.result import plain, write_result
from fxprec.report.runs import HALVES, Half, Run, Track, pairs

RATIO = 0.01  # a larger difference between shares of over- or underflowing elements counts
SCHEMA = 1


@dataclass(frozen=True)
class Parting:
    """A difference of one tensor in one step."""

    step: int
    what: str
    """``"amax"``, ``"overflow"``, ``"underflow"`` of statistics; ``"values"``, ``"norm"``, ``"hash"`` of a dump."""
    ours: float | str
    theirs: float | str
    difference: float
    """Relative to the first run's number; for shares the difference of the shares; for hashes 1."""


@dataclass(frozen=True)
class Pair:
    """One tensor in both runs."""

    ours: Track
    theirs: Track
    steps: tuple[int, ...]
    """Steps in which both runs have the tensor."""
    parting: Parting | None
    """The first difference beyond the tolerance; None if there is none."""
    apart: tuple[float | None, ...]
    """Relative difference by step: of the values if both runs dumped them, otherwise of the largest magnitudes."""

    @property
    def half(self) -> Half:
        """Return the half of a step in which the tensor is computed."""
        return self.ours.half

    @property
    def order(self) -> tuple[int, int, str, tuple[int, int]]:
        """Return a sort key: the step of the first difference, then the order of execution."""
        step = 2**62 if self.parting is None else self.parting.step
        return (step, HALVES.index(self.half), self.ours.graph, self.ours.position)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        place = {name: getattr(self.ours, name) for name in ("graph", "tensor", "kind", "module", "source", "half")}
        formats = self.ours.format, self.theirs.format
        found = place | {"formats": formats, "parting": self.parting, "steps": self.steps, "apart": self.apart}
        return {name: plain(value) for name, value in found.items()}


@dataclass(frozen=True)
class PartedPair(Pair):
    """A pair that differs by more than the tolerance."""

    parting: Parting


@dataclass(frozen=True)
class Comparison:
    """Two runs: the tensors in both, and where they differ."""

    first: str
    second: str
    """Names of the runs."""
    bitwise: bool
    tolerance: float
    pairs: tuple[Pair, ...]
    """Sorted by the step in which they first differ, then by the order of execution."""
    steps: tuple[int, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differences: tuple[str, ...]
    """The first difference between the models of each graph, and settings that differ."""

    @property
    def partings(self) -> tuple[PartedPair, ...]:
        """Return the pairs that differ, in the order of the pairs."""
        return tuple(pair for pair in self.pairs if isinstance(pair, PartedPair))

    def first_in(self, half: Half) -> PartedPair | None:
        """Return the pair of a half that differs first, or None."""
        return next((pair for pair in self.partings if pair.half == half), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, with numbers that are not finite as strings."""
        names = ("first", "second", "bitwise", "tolerance", "steps", "only_first", "only_second", "differences")
        values = {name: plain(getattr(self, name)) for name in names}
        return {"schema": SCHEMA} | values | {"tensors": [pair.to_dict() for pair in self.pairs]}

    def save(self, folder: str | Path) -> Path:
        """Write ``compare.json`` and ``compare.html``; return the page. Raises `ConfigError`."""
        from fxprec.report.compare_page import page

        return write_result(folder, "compare", self.to_dict(), page(self))

    def __str__(self) -> str:
        from fxprec.report.compare_text import text

        return text(self)


def compare_runs(a: Run, b: Run, tolerance: float = 0.1, *, bitwise: bool = False) -> Comparison:
    """Compare what two runs recorded while training.

    ``tolerance`` is relative, for largest magnitudes and for dumped values. ``bitwise`` compares hashes of dumped
    values instead. Raises `PlanError` for a run without dumped values then, and for runs of different models.
    """
    if bitwise:
        _refuse_without_values(a, b)
    joined, missing = list[Pair](), (list[str](), list[str]())
    differences = list[str]()
    for name in (n for n in a.plans if n in b.plans):
        found = list(pairs(a.tracks[name], b.tracks[name]))
        differs = a.plans[name].first_difference(b.plans[name], there="the second")
        differences += (
            [f"the models differ: {name}: {differs}" if name else f"the models differ: {differs}"] if differs else []
        )
        for names, tracks, side in ((missing[0], a.tracks[name], 0), (missing[1], b.tracks[name], 1)):
            seen = {id(pair[side]) for pair in found}
            names += [t.label for t in tracks if id(t) not in seen]
        joined += [_pair(ours, theirs, tolerance, bitwise=bitwise) for ours, theirs in found]
    common = tuple(sorted((pair for pair in joined if pair.steps), key=lambda pair: pair.order))
    if not common:
        raise _strangers(a, b)
    steps = tuple(sorted({step for pair in common for step in pair.steps}))
    differences += _settings(a, b)
    return Comparison(
        a.name, b.name, bitwise, tolerance, common, steps, tuple(missing[0]), tuple(missing[1]), tuple(differences)
    )


def _settings(a: Run, b: Run) -> list[str]:
    """Return a line for each setting that differs between the two runs."""
    ours, theirs = (next(iter(run.plans.values())) for run in (a, b))
    read: dict[str, Callable[[Plan], str]] = {
        "recipe": lambda p: p.recipe.name, "storage": lambda p: p.storage,
        "policy": lambda p: p.policy, "torch": lambda p: p.torch, "fxprec": lambda p: p.fxprec,
    }  # fmt: skip
    return [f"{name}: {x} and {y}" for name, of in read.items() if (x := of(ours)) != (y := of(theirs))]


def _pair(ours: Track, theirs: Track, tolerance: float, *, bitwise: bool) -> Pair:
    """Compare one tensor, step by step."""
    if bitwise:
        steps = sorted(ours.dumps.keys() & theirs.dumps.keys())
        hashes = [(ours.dumps[s].hash, theirs.dumps[s].hash) for s in steps]
        differ = [Parting(s, "hash", x[:12], y[:12], 1.0) for s, (x, y) in zip(steps, hashes, strict=True) if x != y]
        return _made(ours, theirs, steps, differ, tuple(float(x != y) for x, y in hashes))
    in_points, in_dumps = ours.points.keys() & theirs.points.keys(), ours.dumps.keys() & theirs.dumps.keys()
    steps, found, apart = sorted(in_points | in_dumps), list[Parting](), list[float | None]()
    for step in steps:
        at = list(_of_values(ours, theirs, step)) if step in in_dumps else []
        at += _of_statistics(ours, theirs, step) if step in in_points else []
        apart.append(at[0].difference if at else None)
        found += [p for p in at if _counts(p, tolerance)]
    return _made(ours, theirs, steps, found, tuple(apart))


def _made(
    ours: Track, theirs: Track, steps: Sequence[int], found: Sequence[Parting], apart: tuple[float | None, ...]
) -> Pair:
    if not found:
        return Pair(ours, theirs, tuple(steps), None, apart)
    return PartedPair(ours, theirs, tuple(steps), found[0], apart)


def _of_values(ours: Track, theirs: Track, step: int) -> Iterator[Parting]:
    x, y = ours.dumps[step], theirs.dumps[step]
    distance = x.distance(y)
    what = "norm" if distance is None else "values"
    yield Parting(step, what, x.norm, y.norm, _relative(x.norm, y.norm) if distance is None else distance)


def _of_statistics(ours: Track, theirs: Track, step: int) -> Iterator[Parting]:
    x, y = ours.points[step], theirs.points[step]
    yield Parting(step, "amax", x[0], y[0], _relative(x[0], y[0]))
    for what, mine, other in (("overflow", x[1], y[1]), ("underflow", x[2], y[2])):
        if ours.format == theirs.format and math.isnan(mine) == math.isnan(other):  # counted in both
            yield Parting(step, what, mine, other, 0.0 if math.isnan(mine) else abs(mine - other))


def _relative(x: float, y: float) -> float:
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return abs(x - y) / abs(x) if x else math.inf


def _counts(p: Parting, tolerance: float) -> bool:
    is_share = p.what in ("overflow", "underflow")
    return not p.difference <= (0.0 if not tolerance else RATIO if is_share else tolerance)


def _refuse_without_values(a: Run, b: Run) -> None:
    for run in (a, b):
        if not run.has_values:
            raise PlanError(
                f"{run.name}: holds no hashes, which a bitwise comparison needs; train both with options={{'dump': "
                "DIR, 'dump_tensors': ('*',), 'dump_every': 1, 'dump_limit': 0}"
            )


def _strangers(a: Run, b: Run) -> PlanError:
    """Return the error that says why nothing can be compared."""
    for run in (a, b):
        if not run.has_values and not run.has_statistics:
            return PlanError(
                f"{run.name}: holds no {FILE}, so nothing trained there; train with options={{'dump': DIR}}, then "
                "compare"
            )
    if not set(a.plans) & set(b.plans):
        return PlanError(
            f"{a.name} holds {', '.join(a.plans)} and {b.name} {', '.join(b.plans)}: they have no graph name in "
            "common; give two folders that dump= named"
        )
    modules = [sorted({t.module for tracks in run.tracks.values() for t in tracks if t.module}) for run in (a, b)]
    return PlanError(
        f"{a.name} and {b.name} recorded no tensor of the same name in the same step (modules {_first(modules[0])} and "
        f"{_first(modules[1])}); give two runs of one model, both with on_nonfinite='report', which watches all"
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) or "without names"
