"""Find which low tensor causes an error, by bisection over the plan's sites, most harmful half first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from fxprec.config import Config, Settings
from fxprec.errors import ConfigError
from fxprec.minify.oracle import Exact
from fxprec.plan import Site
from fxprec.plan.lines import aligned, one_line
from fxprec.runtime.controller import Controller
from fxprec.testing.case import STEPS, Case, Compiled

WORTH_NAMING = 0.01  # of the whole plan's squared error; the search ends below it


@dataclass(frozen=True)
class Culprit:
    """One site, and the relative error that it alone adds while all other sites are high."""

    site: Site
    error: float


@dataclass(frozen=True)
class Search:
    """The result of a search: the tensor whose error was examined, the error, and the sites that cause it."""

    tensor: str
    error: float
    high: float
    """The error with every site high."""
    culprits: list[Culprit]
    sites: int
    """Number of low sites in all graphs."""
    runs: int
    """Number of steps that were run."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the error, and the sites that cause it, most harmful first."""
        culprits = [
            {name: getattr(c.site, name) for name in ("tensor", "kind", "module", "source", "format")}
            | {"adds": c.error}
            for c in self.culprits
        ]
        error = {"tensor": self.tensor, "error": self.error, "error_with_all_high": self.high}
        return error | {"low_sites": self.sites, "runs": self.runs, "culprits": culprits}

    def text(self) -> str:
        """Return the sites as a table, most harmful first."""
        head = f"{one_line(self.tensor)}: error {self.error:.3g} as planned, {self.high:.3g} with every tensor high"
        lines = [("tensor", "kind", "module", "source", "format", "adds")]
        for c in self.culprits:
            s = c.site
            lines.append((s.tensor, s.kind, s.module, s.source, s.format, f"{c.error:.3g}"))
        table = aligned(lines) if self.culprits else "no tensor held low contributes to it"
        return f"{head} ({self.sites} low, {self.runs} runs)\n{table}"


def find_culprits(case: Case, config: Config, *, tensor: str | None = None, top: int = 10) -> Search:
    """Return up to ``top`` low sites by the error that each adds to ``tensor`` (None: the tensor furthest off).

    Runs in storage ``simulate``, where a site's format is a row of the scale table: one compilation, then one step for
    each subset. Errors of independent roundings add up as squares, so the square of a subset's error bounds what its
    parts add. Subsets are halved, the most harmful first. Raises `ConfigError`.
    """
    recipe = Settings.of(config).recipe
    if recipe.saved is not None:
        raise ConfigError(
            f"recipe {recipe.name!r} saves copies in {recipe.saved.name}, and the search runs in storage='simulate', "
            "which stores no copies; search with a recipe without it"
        )
    compiled = Compiled(case, replace(config, storage="simulate", lowering="eager", promote_above=None))
    exact = Exact.of(case)
    planned = exact.errors(compiled.run(STEPS))
    if not compiled.backend.plans:
        raise ConfigError(f"{case.name} has no graph that is planned, so no tensor can cause the error")
    name = tensor or max(planned.values(), key=lambda m: m.error).name
    if name not in planned:
        raise ConfigError(f"{name!r} is not one of the tensors compared; give one of {', '.join(planned)}")
    sites = [(c, s) for c in compiled.backend.controllers for s in c.plan.sites if s.format != _high(c, s)]
    runs = count(1)

    def error_of(low: Sequence[tuple[Controller, Site]]) -> float:
        next(runs)
        chosen = {(id(c), s.id) for c, s in low}
        for c in compiled.backend.controllers:
            c.hold({s.id: _high(c, s) for s in c.plan.sites if (id(c), s.id) not in chosen})
        measured = exact.errors(compiled.run(1)).get(name)
        return math.inf if measured is None else measured.error

    high = error_of([])
    found = [Culprit(s, e) for (_, s), e in _largest(sites, error_of, high, top)]
    return Search(name, planned[name].error, high, found, len(sites), next(runs))


def _high(controller: Controller, site: Site) -> str:
    return controller.plan.recipe.format_of(site.kind, low=False).name


Subset = Sequence[tuple[Controller, Site]]


def _largest(
    sites: Subset, error_of: Callable[[Subset], float], high: float, top: int
) -> Iterator[tuple[tuple[Controller, Site], float]]:
    """Yield single sites with the error each adds, largest first."""

    def added(subset: Subset) -> float:
        return max(error_of(subset) ** 2 - high**2, 0.0)

    order = count()  # so that the heap never compares subsets
    total = added(sites) if sites else 0.0
    heap = [(-total, next(order), sites)] if sites else []
    while heap and top:
        worst, _, subset = heapq.heappop(heap)
        if -worst <= WORTH_NAMING * total:
            return
        if len(subset) == 1:
            top -= 1
            yield subset[0], math.sqrt(-worst)
            continue
        middle = len(subset) // 2
        for half in (subset[:middle], subset[middle:]):
            heapq.heappush(heap, (-added(half), next(order), half))
