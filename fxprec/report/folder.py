"""Dump folders: for each compiled graph one text per pass, the plan, and statistics while training runs."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fxprec.config import Config
from fxprec.errors import ConfigError
from fxprec.passes import pipeline
from fxprec.passes.base import Work
from fxprec.plan import Plan
from fxprec.report.drawing import FILE as GRAPH
from fxprec.report.drawing import Drawing
from fxprec.report.graph_text import graph_text
from fxprec.report.history import FILE as STATS
from fxprec.report.html import write_report
from fxprec.runtime.controller import Controller

VARIABLE = "FXPREC_DUMP"
THIN_AFTER = 20_000  # lines of stats.jsonl; after each so many, half as many steps are recorded

WHOLE = ("plan.json", GRAPH, "report.html")  # written once a compilation has come so far

_claimed: Counter[Path] = Counter()


class Planned(Exception):
    """Ends a compilation of which only the plan is wanted."""


class DumpFolder:
    """Where one backend dumps its graphs: ``DIR/graph-0``, ...; a process's next backend takes ``DIR/model-1``."""

    def __init__(self, path: Path, *, plan_only: bool = False) -> None:
        self.path, self.plan_only = path, plan_only

    @classmethod
    def of(cls, config: Config) -> DumpFolder | None:
        """Return the folder that ``config.dump`` or else ``FXPREC_DUMP`` names, or None."""
        path = config.dump or os.environ.get(VARIABLE)
        return cls(Path(path)) if path else None

    @cached_property
    def root(self) -> Path:
        """Claimed at the first graph, so that a backend which compiles nothing takes no name."""
        root = self.path
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            root = root / f"rank-{torch.distributed.get_rank()}"
        key = root.resolve()
        _claimed[key] += 1
        return root if _claimed[key] == 1 else root / f"model-{_claimed[key] - 1}"

    def graph(self, index: int) -> GraphDump:
        """Return the dump of one compiled graph. Nothing is written yet."""
        return GraphDump(self, index)

    def forget(self) -> None:
        """Let this process use the folder once more: for a command that starts it anew."""
        _claimed.pop(self.path.resolve(), None)


class GraphDump:
    """The sub-folder of one graph. Every write raises `ConfigError` where the folder cannot be written."""

    def __init__(self, folder: DumpFolder, index: int) -> None:
        self._folder, self._index = folder, index
        self._lines, self._seen = 0, dict[int, object]()
        self._texts = 0
        self._drawing: Drawing | None = None

    @cached_property
    def path(self) -> Path:
        return self._folder.root / f"graph-{self._index}"

    def run(self, work: Work) -> list[pipeline.PassReport]:
        """Run the passes, with a text before the first and after each; then write the plan."""
        self._start()
        self._text("joint", work, {})
        reports = pipeline.run(work, pipeline.PIPELINE, self._after)
        assert work.plan is not None
        self.write_plan(work.plan)
        if self._folder.plan_only:
            raise Planned
        return reports

    def _start(self) -> None:
        """Make the folder; take away what an earlier run, perhaps of more passes, left there."""
        self._texts, self._drawing = 0, None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for old in (*self.path.glob("[0-9][0-9]-*.txt"), *(self.path / name for name in WHOLE)):
                old.unlink(missing_ok=True)
            if not self._lines:
                (self.path / STATS).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def _after(self, report: pipeline.PassReport, work: Work) -> None:
        self._text(report.name, work, report.changed)
        if work.plan is not None and self._drawing is None:  # later passes insert what nobody asked to see
            self._drawing = Drawing.of(work)
            try:
                self._drawing.save(self.path / GRAPH)
            except OSError as error:
                raise _unwritable(self.path, error) from None

    def _text(self, name: str, work: Work, changed: dict[str, tuple[int, int]]) -> None:
        number = f"{self._texts:02}-{name}"
        self._texts += 1
        try:
            (self.path / f"{number}.txt").write_text(graph_text(work, number, changed), encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def write_plan(self, plan: Plan) -> None:
        """Write ``plan.json`` and the report drawn from it."""
        plan.save(self.path / "plan.json")
        try:
            write_report(plan, self.path, title=self.path.name, drawing=self._drawing)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def write_stats(self, controller: Controller) -> None:
        """Append a line for each site whose statistics have arrived since the last call."""
        if (controller.step - 1) % (1 << self._lines // THIN_AFTER):
            return
        fresh = {i: s for i, s in sorted(controller.latest.items()) if self._seen.get(i) is not s}
        if not fresh:
            return
        self._seen.update(fresh)
        text = ""
        for i, stats in fresh.items():
            site = controller.site_of(i)
            row: dict[str, Any] = {"step": controller.step - 1, "row": i, "site": site.id, "tensor": site.tensor}
            row["format"] = site.format
            if controller.keeper is not None and i in controller.keeper.graph.casts:
                row["scale_exponent"] = controller.keeper.describe(i)["scale_exponent"]  # its history is in stats()
            row |= {f: _finite(getattr(stats, f)) for f in ("amax", "overflow_ratio", "underflow_ratio")}
            text += json.dumps(row) + "\n"
        self._lines += len(fresh)
        try:
            with (self.path / STATS).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise _unwritable(self.path, error) from None


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"dump: {path} cannot be written: {error.strerror or error}; choose a writable folder")
