"""The dump of one graph: one text per pass, the plan, and statistics while training runs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fxprec.errors import FxprecError, writing
from fxprec.passes.base import Work
from fxprec.passes.lowering.triton.header import header
from fxprec.passes.lowering.triton.kernel import Kernel
from fxprec.plan import Plan
from fxprec.report.drawing import FILE as GRAPH
from fxprec.report.drawing import Drawing
from fxprec.report.history import FILE as STATS
from fxprec.report.html import write_report
from fxprec.report.tensors import FILE as TENSORS
from fxprec.report.tensors import FOLDER as TENSOR_FILES
from fxprec.report.tensors import Dumped, TensorFolder
from fxprec.runtime.controller import Controller

if TYPE_CHECKING:
    from fxprec.report.dump_folder import DumpFolder

THIN_AFTER = 20_000  # lines of stats.jsonl; each time so many are written, half as many steps are recorded

WHOLE = ("plan.json", GRAPH, "report.html")  # files that are written once a compilation has come far enough


class Planned(Exception):
    """Raised to end a compilation once its plan is made, if only the plan is needed."""


F = TypeVar("F", bound=Callable[..., object])


def _spares_training(write: F) -> F:
    """Let a failed write end the dump instead of the training, once training has begun."""

    @wraps(write)
    def spared(dump: GraphDump, *args: object, **kwargs: object) -> object:
        if dump.is_given_up:
            return None
        try:
            return write(dump, *args, **kwargs)
        except FxprecError as error:
            if dump.tell is None:
                raise
            dump.is_given_up = True
            cause = str(error).split("; ")[0].removeprefix("dump: ")
            dump.tell(f"{cause}; nothing more of this graph is dumped, and training continues")
            return None

    return cast(F, spared)


class GraphDump:
    """The sub-folder of one graph.

    A write raises `ConfigError` if the folder cannot be written. Once training has begun (`tell` is set), a failed
    write ends the dump instead, so that a full disk does not end the run.
    """

    looks_on = True
    """Whether texts of passes and plans for other budgets are needed too."""

    def __init__(self, folder: DumpFolder, index: int) -> None:
        self._folder, self._index = folder, index
        self.tell: Callable[[str], None] | None = None
        self.is_given_up = False
        self._lines, self._seen = 0, dict[int, object]()
        self._drawing: Drawing | None = None
        self._tensors: TensorFolder | None = None

    @cached_property
    def path(self) -> Path:
        """Return the graph's folder."""
        return self._folder.root / f"graph-{self._index}"

    @property
    def plan_only(self) -> bool:
        """Return whether only the plan is needed, because it is made for another machine than this one."""
        return self._folder.plan_only

    @_spares_training
    def start(self) -> None:
        """Create the folder, and remove files of an earlier run, which may have had more passes."""
        self._drawing = None
        with _writable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for old in (*self.path.glob("[0-9][0-9]-*.txt"), *(self.path / name for name in WHOLE)):
                old.unlink(missing_ok=True)
            if not self._lines:
                (self.path / STATS).unlink(missing_ok=True)
            if self._tensors is None:
                (self.path / TENSORS).unlink(missing_ok=True)
                shutil.rmtree(self.path / TENSOR_FILES, ignore_errors=True)

    @_spares_training
    def write_text(self, number: str, text: str) -> None:
        """Write the text of one pass; ``number`` is for instance ``05-insert-casts``."""
        with _writable(self.path):
            (self.path / f"{number}.txt").write_text(text, encoding="utf-8")

    @_spares_training
    def draw(self, work: Work) -> None:
        """Write ``graph.json`` once the plan is known, without the nodes that later passes insert."""
        if work.has("plan") and self._drawing is None:
            self._drawing = Drawing.of(work)
            with _writable(self.path):
                self._drawing.save(self.path / GRAPH)

    def finish(self, plan: Plan) -> None:
        """Write the plan. Raises `Planned` if nothing else is needed."""
        self.write_plan(plan)
        if self.plan_only:
            raise Planned

    @_spares_training
    def write_plan(self, plan: Plan) -> None:
        """Write ``plan.json`` and the report drawn from it."""
        plan.save(self.path / "plan.json")
        with _writable(self.path):
            write_report(plan, self.path, title=self.path.name, drawing=self._drawing)

    @_spares_training
    def write_kernels(self, kernels: Sequence[Kernel], plan: Plan, half: str) -> None:
        """Write the generated kernels of one half: one source file each, with a header, and their launch arguments."""
        folder = self.path / "kernels"
        index = []
        with _writable(folder):
            for old in folder.glob(f"{half}*"):
                old.unlink()
            for i, kernel in enumerate(kernels):
                folder.mkdir(exist_ok=True)
                name = f"{half}-{i:02}-{kernel.name.removeprefix('fxprec_')}.py"
                (folder / name).write_text(header(kernel, plan.sites) + kernel.source, encoding="utf-8")
                index.append({"file": name, **kernel.to_dict()})
            if index:
                text = json.dumps({"schema": 1, "kernels": index}, indent=1)
                (folder / f"{half}.json").write_text(text + "\n", encoding="utf-8")

    @_spares_training
    def write_tensors(self, step: int, half: str, tensors: Sequence[Dumped], limit: int) -> tuple[str, ...]:
        """Write tensors of one half of a step; return the names of those beyond ``limit`` bytes over all steps."""
        self._tensors = self._tensors or TensorFolder(self.path, limit)
        with _writable(self.path):
            return self._tensors.write(step, half, tensors)

    @_spares_training
    def write_stats(self, controller: Controller, *, step: int | None = None) -> None:
        """Append a line for each site whose statistics have arrived since the last call.

        ``step`` is the step of the statistics; by default the step before the controller's.
        """
        step = controller.step - 1 if step is None else step
        if step % (1 << self._lines // THIN_AFTER):
            return
        fresh = {i: s for i, s in sorted(controller.latest.items()) if self._seen.get(i) is not s}
        if not fresh:
            return
        self._seen.update(fresh)
        text = ""
        for i, stats in fresh.items():
            site = controller.site_of(i)
            row: dict[str, Any] = {"step": step, "row": i, "site": site.id, "tensor": site.tensor}
            row["format"] = site.format
            if (scale := controller.scale_of(i)) is not None:
                row["scale_exponent"] = scale["scale_exponent"]  # its history is in stats()
            row |= {"amax": _finite(stats.amax), "overflow_ratio": _finite(stats.overflow_ratio)}
            row["underflow_ratio"] = None if math.isnan(stats.underflow_ratio) else stats.underflow_ratio
            text += json.dumps(row) + "\n"
        self._lines += len(fresh)
        with _writable(self.path), (self.path / STATS).open("a", encoding="utf-8") as file:
            file.write(text)


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _writable(path: Path) -> AbstractContextManager[None]:
    return writing(f"dump: {path}")
