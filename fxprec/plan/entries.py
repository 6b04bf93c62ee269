"""Read a `Plan` from JSON data: check the type of each value and each reference, and evaluate nothing.

The type of a dataclass's field says how the field is read: `_READERS` has the simple types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from fxprec.config.recipes import FORMAT_ROLES, Recipe
from fxprec.errors import FxprecError, PlanError, did_you_mean
from fxprec.numerics.blocks import AnyFormat, find_blocks
from fxprec.numerics.formats import parse
from fxprec.plan.rows import LIVE, BlockFormatName, FormatName, Live, Reason, Share, Site

if TYPE_CHECKING:
    from fxprec.plan.plan import Plan

MAX_TEXT = 100_000
MAX_REASON = 200
_LARGEST = 2**63 - 1
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Entry:
    """A JSON value and where it stands (``sites[3].format``)."""

    value: Any
    path: str = ""

    def fail(self, cause: str, way_out: str) -> PlanError:
        return PlanError(f"{self.path or 'top level'}: {cause}; {way_out}")

    def wrong(self, wanted: str) -> PlanError:
        shown = repr(self.value)
        return self.fail(f"is {shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + '...'}", f"it must be {wanted}")

    def get(self, key: str) -> Entry:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            near = did_you_mean(key, [k for k in self.value if len(k) <= _SHOWN])
            raise self.fail(f"has no {key!r}{near.replace('did you mean', 'is it')}", "add it, or plan again")
        return Entry(self.value[key], f"{self.path}.{key}" if self.path else key)

    def items(self) -> Iterator[Entry]:
        if not isinstance(self.value, list):
            raise self.wrong("an array")
        for i, value in enumerate(self.value):
            yield Entry(value, f"{self.path}[{i}]")


Reader = Callable[[Entry], Any]


def _text(entry: Entry) -> str:
    if not isinstance(entry.value, str):
        raise entry.wrong("text")
    if len(entry.value) > MAX_TEXT:
        raise entry.fail(f"is text of {len(entry.value)} characters", f"the longest allowed has {MAX_TEXT}")
    return entry.value


def _count(entry: Entry) -> int:
    if type(entry.value) is not int or not 0 <= entry.value <= _LARGEST:
        raise entry.wrong("an int from 0 to 2**63 - 1")
    return entry.value


def _flag(entry: Entry) -> bool:
    if not isinstance(entry.value, bool):
        raise entry.wrong("true or false")
    return entry.value


def _finite(entry: Entry) -> float:
    if type(entry.value) not in (int, float) or not math.isfinite(entry.value):
        raise entry.wrong("a finite number")
    return float(entry.value)


def _share(entry: Entry) -> float:
    found = _finite(entry)
    if not 0 <= found <= 1:
        raise entry.wrong("a number from 0 to 1")
    return found


def _word(*allowed: str) -> Reader:
    def read(entry: Entry) -> str:
        if not isinstance(entry.value, str) or entry.value not in allowed:
            hint = did_you_mean(entry.value, allowed) if isinstance(entry.value, str) else ""
            raise entry.wrong(f"one of {', '.join(map(repr, allowed))}{hint}")
        return entry.value

    return read


def _or_null(read: Reader) -> Reader:
    return lambda entry: None if entry.value is None else read(entry)


def _reason(entry: Entry) -> str:
    text = _text(entry)
    if len(text) > MAX_REASON or not text.isprintable():
        raise entry.wrong(f"one line of at most {MAX_REASON} characters")
    return text


def _format(entry: Entry) -> str:
    return _name_of(entry, parse, "a format, such as 'bf16' or '1-4-3+4'")


def _block_format(entry: Entry) -> str:
    return _name_of(entry, find_blocks, "a block format, such as 'mxfp4' or 'int4/64:bf16'") if entry.value else ""


def _name_of(entry: Entry, read: Callable[[str], AnyFormat], what: str) -> str:
    text = _text(entry)
    if len(text) > _SHOWN:
        raise entry.wrong(f"the name of {what}")
    try:
        return read(text).name
    except FxprecError as error:
        raise PlanError(f"{entry.path}: {error}") from None


def _each(read: Reader, entry: Entry) -> tuple[Any, ...]:
    return tuple(map(read, entry.items()))


def _moments(entry: Entry) -> tuple[tuple[int, ...], ...]:
    """Read rows of as many counts as there are kinds of bytes."""
    rows = tuple(_each(_count, row) for row in entry.items())
    for i, row in enumerate(rows):
        if len(row) != len(LIVE):
            raise entry.fail(f"has {len(row)} numbers in entry {i}", f"give {len(LIVE)}: {', '.join(LIVE)}")
    return rows


def _rows(read: Reader, entry: Entry) -> tuple[Any, ...]:
    """Read a table whose ids are positions."""
    rows = []
    for i, item in enumerate(entry.items()):
        row = read(item)
        if row.id != i:
            cause = f"is {row.id}, which entry {row.id} has already" if row.id < i else f"is {row.id}, not {i}"
            raise item.get("id").fail(cause, "number the entries 0, 1, 2, ... in order")
        rows.append(row)
    return tuple(rows)


def _record(cls: type, entry: Entry) -> Any:
    """Read a dataclass. A field with a default may be absent; an unknown key is an error."""
    readers, optional = _fields(cls)
    if not isinstance(entry.value, dict):
        raise entry.wrong("an object")
    for key in entry.value:
        if key not in readers and (cls.__name__, key) not in _FORMER:
            hint = did_you_mean(key, readers) if len(key) <= _SHOWN else ""
            raise entry.fail(f"has an unknown key {key[:_SHOWN]!r}{hint}", "remove it, or update fxprec")
    wanted = [name for name in readers if name in entry.value or name not in optional]
    return cls(**{name: readers[name](entry.get(name)) for name in wanted})


_FORMER = (("Site", "stats"), ("Plan", "compute"))
"""Keys that earlier versions wrote. Nothing reads them, and they are no error."""
_FORMER_UNREAD = "nobody would read a low copy"
"""How ``why`` began in plan files from before there was ``unread``."""


def _site(entry: Entry) -> Site:
    """Read a site. A site of an older file has no ``unread``; the text of ``why`` tells it there."""
    site: Site = _record(Site, entry)
    if "unread" in entry.value:
        return site
    return replace(site, unread=site.why.startswith(_FORMER_UNREAD))


_READERS: Mapping[object, Reader] = {
    str: _text,
    int: _count,
    bool: _flag,
    float: _finite,
    Share: _share,
    Reason: _reason,
    FormatName: _format,
    BlockFormatName: _block_format,
    Live: _moments,
    Site: _site,
}


@cache
def _fields(cls: type) -> tuple[Mapping[str, Reader], Set[str]]:
    """Return what reads each field of a dataclass, and the fields with a default."""
    if cls is Recipe:
        hints: dict[str, Any] = {"name": str, **dict.fromkeys(FORMAT_ROLES, FormatName), "pure": bool}
        hints["saved"] = BlockFormatName | None
    else:
        hints = get_type_hints(cls, include_extras=True)
    optional = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
    return {name: _reader(hint) for name, hint in hints.items()}, optional


def _reader(hint: Any) -> Reader:
    """Return what reads a value of a field's type."""
    if hint in _READERS:
        return _READERS[hint]
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return _word(*filter(None, parts))  # a field that is "" is left out of a file
    if get_origin(hint) is tuple:
        return partial(_rows if "id" in getattr(parts[0], "__dataclass_fields__", ()) else _each, _reader(parts[0]))
    if NoneType in parts:
        return _or_null(_reader(next(part for part in parts if part is not NoneType)))
    return partial(_record, hint)


_REQUIRED = ("recipe", "policy", "requested_low_ratio", "achieved_low_ratio", "gemms", "groups", "sites")


def read_plan(entry: Entry, kind: type[Plan]) -> Plan:
    """Return the plan of a parsed file, made by ``kind``. Raises `PlanError` naming the entry."""
    for key in _REQUIRED:
        entry.get(key)
    plan: Plan = _record(kind, entry)
    _check_compute(entry)
    _check_groups(plan)
    _check_references(plan)
    _check_directions(plan)
    return plan


def _check_compute(entry: Entry) -> None:
    """Refuse a plan of real storage in which every reader gets the stored value: one without ``compute`` is older."""
    compute = entry.get("compute") if "compute" in entry.value else Entry("stored", "compute")
    _word("high", "stored")(compute)
    if compute.value == "stored" and entry.value.get("storage", "native") != "simulate":
        raise compute.fail(
            "is 'stored' (as in a file that does not say): every reader got the stored value, as no storage does now",
            "plan again: native and packed storage have operators read values, and storage='simulate' rounds for every "
            "reader, as the papers do",
        )


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
    ]
    for path, group in references:
        if group >= len(plan.groups):
            raise Entry(group, path).fail(f"is {group}, and there is no such group", "name one in 'groups'")


def _check_directions(plan: Plan) -> None:
    for site in plan.sites:
        here = Entry(site.direction, f"sites[{site.id}].direction")
        is_gradient = site.kind.startswith("grad")
        if is_gradient != (site.direction == "backward"):
            raise here.fail(f"is {site.direction!r} for kind {site.kind!r}", "gradients are backward, all else forward")
        if is_gradient and site.promoted_at is not None:
            where = Entry(None, f"sites[{site.id}].promoted_at")
            raise where.fail("is set for a gradient", "gradients are never promoted, write null")
