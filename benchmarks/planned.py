"""What was planned while a model trained: the graphs, casts that are not those of the plan, and what ran uncompiled."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.fx import Node

import fxprec
from fxprec.ir.symbolic import Quantize
from fxprec.plan.rows import Site

with warnings.catch_warnings():  # torch's own, at the import of Inductor
    warnings.simplefilter("ignore", DeprecationWarning)
    from fxprec.passes import pipeline


@contextmanager
def recorded_works() -> Iterator[list[Any]]:
    """Collect the `Work` of every graph planned inside."""
    works: list[Any] = []
    run = pipeline.run

    def recording(work: Any, *args: Any) -> Any:
        works.append(work)
        return run(work, *args)

    with mock.patch.object(pipeline, "run", recording):
        yield works


def casts_of(work: Any) -> Iterator[tuple[Node, Quantize, Site]]:
    """Yield each cast of a planned graph with its row of the plan."""
    sites = work.book.sites if work.plan is None else work.plan.sites
    site_of = {} if work.scales is None else work.scales.site_of
    for q, cast in Quantize.among(Quantize.nodes(work.joint.graph)):
        yield q, cast, sites[site_of.get(cast.row, cast.row)]


def misfits(work: Any) -> list[str]:
    """Return the casts of a planned graph whose format is not that of their row of the plan."""
    return [
        f"{q.name} of {site.tensor} is in {cast.format}, and its row says {site.stored_as}"
        for q, cast, site in casts_of(work)
        if str(cast.format) not in (site.format, site.saved_as)
    ]


def said_by(backend: fxprec.Backend) -> list[str]:
    """Return what a backend warned of or left out, once each."""
    kinds = ("fallback", "uncompiled", "kept", "limit")
    return sorted({f"{event.kind}: {event.detail}"[:300] for event in backend.events if event.kind in kinds})
