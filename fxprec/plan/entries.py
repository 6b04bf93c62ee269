"""Read a `Plan` from JSON data: check the type of each value and each reference, and evaluate nothing.

The type annotation of a dataclass field decides how the field is read; `_READERS` has the simple types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from fxprec.config.operands import PRODUCTS, Operands
from fxprec.config.recipes import FORMAT_ROLES, RECIPE_FLAGS, Recipe
from fxprec.errors import FxprecError, PlanError
from fxprec.numerics.blocks import AnyFormat, find_blocks
from fxprec.numerics.formats import parse
from fxprec.plan.reading import SHOWN, Entry, Reader, count, each, fields_of, finite, flag, or_one_of, text, word
from fxprec.plan.rows import LIVE, BlockFormatName, FormatName, Live, OneLine, Share

if TYPE_CHECKING:
    from fxprec.plan.plan import Plan

MAX_REASON = 200


def _share(entry: Entry) -> float:
    found = finite(entry)
    if not 0 <= found <= 1:
        raise entry.wrong("a number from 0 to 1")
    return found


def _one_line(entry: Entry) -> str:
    found = text(entry)
    if len(found) > MAX_REASON or not found.isprintable():
        raise entry.wrong(f"one line of at most {MAX_REASON} characters")
    return found


def _format(entry: Entry) -> str:
    return _name_of(entry, parse, "a format, such as 'bf16' or '1-4-3+4'")


def _block_format(entry: Entry) -> str:
    return _name_of(entry, find_blocks, "a block format, such as 'mxfp4' or 'int4/64:bf16'") if entry.value else ""


def _name_of(entry: Entry, read: Callable[[str], AnyFormat], what: str) -> str:
    found = text(entry)
    if len(found) > SHOWN:
        raise entry.wrong(f"the name of {what}")
    try:
        return read(found).name
    except FxprecError as error:
        raise PlanError(f"{entry.path}: {error}") from None


def _moments(entry: Entry) -> tuple[tuple[int, ...], ...]:
    """Read rows of ``len(LIVE)`` byte counts."""
    rows: tuple[tuple[int, ...], ...] = each(each(count))(entry)
    for i, row in enumerate(rows):
        if len(row) != len(LIVE):
            raise entry.fail(f"has {len(row)} numbers in entry {i}", f"give {len(LIVE)}: {', '.join(LIVE)}")
    return rows


def _rows(read: Reader, entry: Entry) -> tuple[object, ...]:
    """Read a table whose rows have their position as ``id``."""
    rows = []
    for i, item in enumerate(entry.items()):
        row = read(item)
        if row.id != i:
            cause = f"is {row.id}, which entry {row.id} has already" if row.id < i else f"is {row.id}, not {i}"
            raise item.get("id").fail(cause, "number the entries 0, 1, 2, ... in order")
        rows.append(row)
    return tuple(rows)


def record(cls: type, entry: Entry) -> Any:
    """Read a dataclass. A field with a default may be absent; an annotation may have a reader of its own.

    Raises `PlanError` for a wrong value and for an unknown key.
    """
    return cls(**_fields(cls)(entry))


_READERS: Mapping[object, Reader] = {
    str: text,
    int: count,
    bool: flag,
    float: finite,
    Share: _share,
    OneLine: _one_line,
    FormatName: _format,
    BlockFormatName: _block_format,
    Live: _moments,
}


@cache
def _fields(cls: type) -> Reader:
    """Return a reader of the fields of a dataclass."""
    if cls is Recipe:
        hints: dict[str, object] = {
            "name": str,
            **dict.fromkeys(FORMAT_ROLES, FormatName),
            **dict.fromkeys(RECIPE_FLAGS, bool),
        }
        hints |= {"saved": BlockFormatName | None, "operands": Operands | None}
    elif cls is Operands:
        hints = get_type_hints(cls) | dict.fromkeys(PRODUCTS, BlockFormatName)
    else:
        hints = get_type_hints(cls, include_extras=True)
    optional = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
    return fields_of({name: _reader(hint) for name, hint in hints.items()}, optional)


def _reader(hint: Any) -> Reader:
    """Return a reader of values of a field's type."""
    if hint in _READERS:
        return _READERS[hint]
    own: Reader | None = next(filter(callable, getattr(hint, "__metadata__", ())), None)
    if own is not None:
        return own
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return word(*filter(None, parts))  # files omit a field whose value is ""
    if get_origin(hint) is tuple:
        read = _reader(parts[0])
        return partial(_rows, read) if "id" in getattr(parts[0], "__dataclass_fields__", ()) else each(read)
    if NoneType in parts:
        return or_one_of([None], _reader(next(part for part in parts if part is not NoneType)))
    return partial(record, hint)


_REQUIRED = ("recipe", "policy", "requested_low_ratio", "achieved_low_ratio", "gemms", "groups", "sites")


def read_plan(entry: Entry, kind: type[Plan]) -> Plan:
    """Return the plan of a parsed file as a ``kind``. Raises `PlanError` naming the entry."""
    for key in _REQUIRED:
        entry.get(key)
    plan: Plan = record(kind, entry)
    _check_groups(plan)
    _check_references(plan)
    _check_directions(plan)
    return plan


def _check_groups(plan: Plan) -> None:
    orders: dict[int, int] = {}
    for group in plan.groups:
        parts = group.elements_by_kind.total
        if group.elements != parts:
            here = Entry(group.elements, f"groups[{group.id}].elements")
            raise here.fail(f"is {group.elements}, but its kinds add up to {parts}", "plan again")
        first = orders.setdefault(group.order, group.id)
        if first != group.id:
            here = Entry(group.order, f"groups[{group.id}].order")
            raise here.fail(f"is {group.order}, as for group {first}", "give each group a position of its own")
    total = sum(group.elements for group in plan.groups)
    if plan.total_elements != total:
        here = Entry(plan.total_elements, "total_elements")
        raise here.fail(f"is {plan.total_elements}, but the groups add up to {total}", "plan again")


def _check_references(plan: Plan) -> None:
    references: Sequence[tuple[str, int]] = [
        *((f"gemms[{g.id}].group_before", g.group_before) for g in plan.gemms),
        *((f"gemms[{g.id}].group_after", g.group_after) for g in plan.gemms),
        *((f"sites[{s.id}].group", s.group) for s in plan.sites),
        *((f"saved[{i}].group", row.group) for i, row in enumerate(plan.saved)),
    ]
    for path, group in references:
        if group >= len(plan.groups):
            raise Entry(group, path).fail(f"is {group}, and there is no such group", "name one in 'groups'")
    for i, row in enumerate(plan.saved):
        if row.site is not None and row.site >= len(plan.sites):
            here = Entry(row.site, f"saved[{i}].site")
            raise here.fail(f"is {row.site}, and there is no such site", "name one in 'sites'")


def _check_directions(plan: Plan) -> None:
    for site in plan.sites:
        here = Entry(site.direction, f"sites[{site.id}].direction")
        is_gradient = site.kind.startswith("grad")
        if is_gradient != (site.direction == "backward"):
            raise here.fail(f"is {site.direction!r} for kind {site.kind!r}", "gradients are backward, all else forward")
        if is_gradient and site.promoted_at is not None:
            where = Entry(None, f"sites[{site.id}].promoted_at")
            raise where.fail("is set for a gradient", "gradients are never promoted, write null")
