"""Read the tensors of a run, to compare it with another run: statistics of each step, and dumped values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fxprec.plan import Plan
from fxprec.report import safetensors
from fxprec.report.history import FILE, rows_of
from fxprec.report.load import plans_of
from fxprec.report.tensors import read_tensors

Point = tuple[float, float, float]
"""amax, overflow ratio, underflow ratio."""
Series = Mapping[int, Mapping[int, Point]]
"""Points by site, then by step; for a site with several casts, those of the first cast."""
Half = Literal["update", "forward", "backward"]
HALVES: tuple[Half, ...] = ("update", "forward", "backward")
"""The halves in order. ``update``: a step's weights were made by the previous step's update."""


@dataclass(frozen=True)
class Dump:
    """One tensor in one step, as ``dump_tensors`` wrote it."""

    hash: str
    norm: float
    amax: float
    folder: Path
    file: str | None
    name: str

    def distance(self, other: Dump) -> float | None:
        """Return the L2 distance divided by this tensor's norm; None if the values of one tensor are missing."""
        if self.hash == other.hash:
            return 0.0
        if self.file is None or other.file is None:
            return None
        ours, theirs = (safetensors.load(d.folder / str(d.file), d.name).double() for d in (self, other))
        if ours.shape != theirs.shape:
            return None
        return float((ours - theirs).norm() / ours.norm().clamp_min(1e-30))


@dataclass
class Track:
    """One tensor through a run."""

    graph: str
    tensor: str
    kind: str
    module: str
    source: str
    format: str
    position: tuple[int, int]
    """Sort key: the order of execution within a half."""
    is_site: bool
    points: Mapping[int, Point] = field(default_factory=dict)
    """Statistics of the tensor by step."""
    dumps: dict[int, Dump] = field(default_factory=dict)

    @property
    def half(self) -> Half:
        """Return the half of a step in which the tensor is computed."""
        return "update" if self.kind == "param" and self.dumps else "backward" if "grad" in self.kind else "forward"

    @property
    def steps(self) -> set[int]:
        """Return the steps with a statistic or a dump."""
        return {*self.points, *self.dumps}

    @property
    def label(self) -> str:
        """Return tensor, kind and module as text."""
        return f"{self.tensor} ({self.kind}{f', {self.module}' if self.module else ''})"


@dataclass(frozen=True)
class Run:
    """Plans by graph name, and a track for each tensor that is a site or was dumped."""

    name: str
    plans: Mapping[str, Plan]
    tracks: Mapping[str, Sequence[Track]]

    @property
    def has_values(self) -> bool:
        """Return whether any tensor was dumped."""
        return any(track.dumps for tracks in self.tracks.values() for track in tracks)

    @property
    def has_statistics(self) -> bool:
        """Return whether any tensor has statistics."""
        return any(track.points for tracks in self.tracks.values() for track in tracks)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a dump folder. Raises `PlanError` if there is none, or if it is damaged."""
        plans = plans_of(path)
        places = {name: path / name if name else path for name in plans}
        return cls.of(str(path), plans, {name: _series(places[name] / FILE, plans[name]) for name in plans}, places)

    @classmethod
    def of(cls, name: str, plans: Mapping[str, Plan], series: Mapping[str, Series], folders: Mapping[str, Path]) -> Run:
        """Combine plans and statistics with the tensors dumped in the folders, by graph name."""
        tracks = {graph: _tracks(graph, plan, series[graph]) for graph, plan in plans.items()}
        for graph, folder in folders.items():
            _add_dumps(tracks[graph], graph, folder)
        return cls(name, plans, tracks)


def _series(file: Path, plan: Plan) -> Series:
    found: dict[int, dict[int, Point]] = {}
    first: dict[int, int] = {}  # the row of a site's first cast
    for row in rows_of(file, len(plan.sites)):
        if first.setdefault(row["site"], row["row"]) == row["row"]:
            point = (row["amax"], row["overflow_ratio"], row["underflow_ratio"])
            found.setdefault(row["site"], {})[row["step"]] = point
    return found


def _tracks(graph: str, plan: Plan, series: Series) -> list[Track]:
    return [
        Track(graph, s.tensor, s.kind, s.module, s.source, s.stored_as, (s.order[1], 0), True, series.get(s.id, {}))
        for s in plan.sites
    ]


def _add_dumps(tracks: list[Track], graph: str, folder: Path) -> None:
    known = {(t.tensor, t.kind): t for t in tracks}
    before: dict[str, tuple[int, int]] = {}  # by half: the position of the previous line
    for row in read_tensors(folder):
        track = known.get((row["tensor"], row["kind"]))
        last, count = before.get(row["half"], (-(2**31), 0))
        if track is None:
            tensor, kind, module, source, dtype = (row[n] for n in ("tensor", "kind", "module", "source", "dtype"))
            track = Track(graph, tensor, kind, module, source, dtype, (last, count + 1), False)
            known[row["tensor"], row["kind"]] = track
            tracks.append(track)
        before[row["half"]] = track.position
        name = f"{row['tensor']}:{row['kind']}"
        track.dumps[row["step"]] = Dump(row["hash"], row["norm"], row["amax"], folder, row["file"], name)


def pairs(a: Sequence[Track], b: Sequence[Track]) -> Iterator[tuple[Track, Track]]:
    """Yield pairs of tracks: of the same tensor and kind, or the n-th of a kind in the same module."""
    by_tensor = {(t.tensor, t.kind, t.module): t for t in b}
    by_place = dict(zip(_places(b), b, strict=True))
    for track, place in zip(a, _places(a), strict=True):
        other = by_tensor.get((track.tensor, track.kind, track.module)) or by_place.get(place)
        if other is not None:
            yield track, other


def _places(tracks: Sequence[Track]) -> list[tuple[str, str, bool, int]]:
    seen: dict[tuple[str, str, bool], int] = {}
    places = []
    for t in tracks:
        key = (t.module, t.kind, t.is_site)
        seen[key] = seen.get(key, -1) + 1
        places.append((*key, seen[key]))
    return places
