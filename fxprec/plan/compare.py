"""Decide whether two plans belong to the same model, and match the sites that store the same tensor.

Formats are not compared. Node names are compared without their numbers: FX counts every node that it ever created, so
a second trace of the same graph, especially under dynamic shapes, may number the nodes differently.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from fxprec.errors import PlanError
from fxprec.plan.rows import Site

if TYPE_CHECKING:
    from fxprec.plan.plan import Plan

# The fields that identify the model, by table; the first field names the entry. Fields in _SIZES depend on the batch.
_MODEL = {
    "gemms": ("node", "op", "module", "group_before", "group_after"),
    "groups": ("operators", "size", "elements"),
    "sites": ("tensor", "kind", "module", "group", "shape"),
}
_SIZES = frozenset({"size", "elements", "shape"})
_NODES = frozenset({"node", "operators", "tensor"})


def first_difference(here: Plan, other: Plan, *, there: str, sizes: bool = True) -> str | None:
    """Return a text on the first difference between two plans' models, or None.

    ``there``: what the text calls ``other``. ``sizes=False`` ignores elements and shapes.
    """
    for table, names in _MODEL.items():
        compared = [name for name in names if sizes or name not in _SIZES]
        ours, theirs = getattr(here, table), getattr(other, table)
        rows = enumerate(zip(ours, theirs, strict=False))
        found = (_in_row(table, i, a, b, compared, there) for i, (a, b) in rows)
        if (difference := next(filter(None, found), None)) is not None:
            return difference
        if len(ours) != len(theirs):
            return f"{len(ours)} {table} here but {len(theirs)} in {there}{_extra(ours, theirs, compared[0])}"
    return None


def refuse_another_site(row: int, site: Site, given: Sequence[Site]) -> None:
    """Raise `PlanError` if row ``row`` of a given plan is missing or has another tensor than ``site``."""
    if row >= len(given):
        raise another_model(f"site {row} is {site.tensor!r} here, and the given plan has {len(given)} sites")
    difference = _in_row("sites", row, site, given[row], ("tensor", "kind", "module", "group"), "the given plan")
    if difference is not None:
        raise another_model(difference)


def another_model(difference: str) -> PlanError:
    """Return the error for a given plan that belongs to another model."""
    return PlanError(f"the given plan belongs to another model: {difference}; drop plan= to plan again")


def partners(here: Plan, other: Plan) -> Mapping[int, int]:
    """Map site ids of ``here`` to the site ids of ``other`` with the same tensor, for two graphs of one model.

    A training graph has sites that its evaluation graph lacks, so ids alone do not match. Sites with the same kind,
    module, source line and node name are matched in order, or by full node name if their numbers differ.
    """
    ours, theirs = _by_place(here), _by_place(other)
    found: dict[int, int] = {}
    for place, equals in ours.items():
        candidates = theirs.get(place, [])
        if len(equals) == len(candidates):
            found |= {a.id: b.id for a, b in zip(equals, candidates, strict=True)}
        else:
            named = {b.tensor: b.id for b in candidates}
            found |= {a.id: named[a.tensor] for a in equals if a.tensor in named}
    return found


def low_groups_with(trained: Plan, gemms: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Return which groups of another graph of the same model are low according to the training plan ``trained``.

    ``gemms`` are the groups before and after each GEMM of the other graph. Groups by data flow are matched at their
    GEMMs, as a loss or input that only training has changes their numbers. A group is low if all its matches are low.
    """
    if trained.grouping == "execution":
        return trained.low_groups
    is_low: dict[int, bool] = {}
    for gemm, borders in zip(trained.gemms, gemms, strict=True):
        for theirs, ours in zip((gemm.group_before, gemm.group_after), borders, strict=True):
            is_low[ours] = is_low.get(ours, True) and trained.groups[theirs].low
    return frozenset(group for group, low in is_low.items() if low)


def _by_place(plan: Plan) -> dict[Hashable, list[Site]]:
    found: dict[Hashable, list[Site]] = defaultdict(list)
    for site in plan.sites:
        group = site.group if plan.grouping == "execution" else None  # data-flow groups have other numbers per graph
        name = site.tensor if site.kind.endswith("param") else _unnumbered(site.tensor)
        found[site.kind, group, site.module, site.source, name].append(site)
    return found


def _unnumbered(name: str) -> str:
    """Return an FX node's name without the number that makes it unique."""
    return re.sub(r"_\d+$", "", name)


def _identity(row: object, name: str) -> object:
    """Return the part of a field's value that identifies the model."""
    value = getattr(row, name)
    if name not in _NODES or getattr(row, "kind", "").endswith("param"):
        return value
    return tuple(map(_unnumbered, value)) if isinstance(value, tuple) else _unnumbered(value)


def _in_row(table: str, i: int, a: object, b: object, names: Sequence[str], there: str) -> str | None:
    for name in names:
        if _identity(a, name) != _identity(b, name):
            what = f"{table[:-1]} {i}" if name == names[0] else f"{table[:-1]} {i}{_called(a, names[0])} {name}"
            return f"{what} is {_shown(getattr(a, name))} here but {_shown(getattr(b, name))} in {there}"
    return None


def _called(row: object, name: str) -> str:
    value = getattr(row, name)
    return f" ({value})" if isinstance(value, str) else ""


def _shown(value: object) -> str:
    return ", ".join(value) or "empty" if isinstance(value, tuple) else repr(value)


def _extra(ours: Sequence[object], theirs: Sequence[object], name: str) -> str:
    longer = max(ours, theirs, key=len)
    first = getattr(longer[min(len(ours), len(theirs))], name)
    return f"; the first without a partner is {_shown(first)}"
