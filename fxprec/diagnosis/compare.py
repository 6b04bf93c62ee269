"""`compare`: two dump folders, or two live backends, side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fxprec.driver.backend import Backend
from fxprec.driver.named import find_backend
from fxprec.errors import ConfigError
from fxprec.report.runs import Run
from fxprec.report.streams import Comparison, compare_runs
from fxprec.runtime.controller import Controller

TOLERANCE = 0.1


def compare(a: object, b: object, *, tolerance: float = TOLERANCE, bitwise: bool = False) -> Comparison:
    """Report where two runs of one model on the same batches first differ.

    ``a`` and ``b`` are dump folders, or a training that runs now: a `Backend`, or a model that fxprec compiled. For a
    running training, the statistics of up to 200 steps are known, and what ``dump_tensors`` has written. ``tolerance``
    is relative; with ``bitwise`` hashes of dumped values are compared instead. Raises `ConfigError` and `PlanError` for
    runs that cannot be compared.
    """
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not 0 <= tolerance < float("inf"):
        raise ConfigError(f"tolerance is {tolerance!r}; give a relative difference of at least 0, such as 0.1")
    return compare_runs(_run(a, "first"), _run(b, "second"), float(tolerance), bitwise=bitwise)


def _run(given: object, which: str) -> Run:
    if isinstance(given, str | os.PathLike):
        return Run.load(Path(given))
    backend = given if isinstance(given, Backend) else find_backend(given)
    if backend is None:
        raise ConfigError(
            f"the {which} run is {type(given).__name__}; give compare a dump folder, a Backend or a model that fxprec "
            "compiled"
        )
    return run_of(backend, f"the {which} backend")


def run_of(backend: Backend, name: str) -> Run:
    """Return what a live backend knows of its training graphs; waits for statistics that have not arrived.

    Raises `ConfigError` if nothing has trained, or no statistics are kept.
    """
    backend.stats()
    graphs = backend.training_graphs()
    if not graphs:
        raise ConfigError(f"{name} has compiled no training graph yet; run a step first")
    if all(controller.nonfinite is None for _, controller, _ in graphs):
        raise ConfigError(f"{name} keeps no statistics under on_nonfinite='ignore'; use 'report', or leave it out")
    return Run.of(
        name,
        {graph: controller.plan for graph, controller, _ in graphs},
        {graph: _series(controller) for graph, controller, _ in graphs},
        {graph: folder for graph, _, folder in graphs if folder is not None},
    )


def _series(controller: Controller) -> dict[int, Any]:
    if controller.nonfinite is None:
        return {}
    watched = controller.nonfinite.series()
    sites = {row: controller.site_of(row).id for row in sorted(watched)}
    first = {site: row for row, site in reversed(sites.items())}
    return {site: {step: rest for step, *rest in watched[row]} for site, row in first.items()}
