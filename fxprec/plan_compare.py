"""Whether two plans belong to the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxprec.plan import Plan

# Which fields make up the model, by table, the one that names an entry first; those of _SIZES say how large it is.
_MODEL = {
    "gemms": ("node", "op", "module", "group_before", "group_after"),
    "groups": ("operators", "size", "elements"),
    "sites": ("tensor", "kind", "module", "group", "shape"),
}
_SIZES = frozenset({"size", "elements", "shape"})


def first_difference(here: Plan, other: Plan, *, there: str, sizes: bool = True) -> str | None:
    """Name the first difference of two plans' models, or return None.

    ``there`` is what the message calls ``other``. With ``sizes=False`` elements and shapes are left out.
    """
    for table, names in _MODEL.items():
        compared = [name for name in names if sizes or name not in _SIZES]
        ours, theirs = getattr(here, table), getattr(other, table)
        found = _in_rows(table, ours, theirs, compared, there)
        if found is not None:
            return found
        if len(ours) != len(theirs):
            return f"{len(ours)} {table} here but {len(theirs)} in {there}{_extra(ours, theirs, compared[0])}"
    return None


def _in_rows(table: str, ours: Sequence[Any], theirs: Sequence[Any], names: Sequence[str], there: str) -> str | None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        for name in names:
            if getattr(a, name) != getattr(b, name):
                what = f"{table[:-1]} {i}" if name == names[0] else f"{table[:-1]} {i}{_called(a, names[0])} {name}"
                return f"{what} is {_shown(getattr(a, name))} here but {_shown(getattr(b, name))} in {there}"
    return None


def _called(row: Any, name: str) -> str:
    value = getattr(row, name)
    return f" ({value})" if isinstance(value, str) else ""


def _shown(value: Any) -> str:
    return ", ".join(value) or "empty" if isinstance(value, tuple) else repr(value)


def _extra(ours: Sequence[Any], theirs: Sequence[Any], name: str) -> str:
    longer = max(ours, theirs, key=len)
    first = getattr(longer[min(len(ours), len(theirs))], name)
    return f"; the first without a partner is {_shown(first)}"
