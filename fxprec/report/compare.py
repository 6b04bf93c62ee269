"""Compare two plans: which tensors changed their format, why, and by how many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fxprec.config.ways import WAYS_SAID
from fxprec.numerics.blocks import BlockFormat, find
from fxprec.plan import Plan, Site
from fxprec.plan.lines import one_line, place

_VERSIONS = {"fxprec", "torch", "schema"}
_TABLES = ("gemms", "groups", "sites")
_SAID = {"format", "saved_as", "form", "promoted_at", "why", "unread"}
"""Fields of a site that are reported in another line."""
_SHOWN = 20
_Row = dict[str, Any]
_NAMES: dict[str, Callable[[_Row], str]] = {
    "gemms": lambda row: f"GEMM {row['id']} ({row['op']}, {row['module']})",
    "groups": lambda row: f"group {row['id']}",
    "sites": lambda row: f"{row['tensor']} ({row['kind']})",
}


@dataclass(frozen=True, slots=True)
class Move:
    """One site that is held otherwise.

    ``bytes``: how many more bytes its tensor takes in the second plan; with another way, those waiting for backward.
    """

    before: Site
    after: Site
    bytes: int
    why: str


def moves(a: Plan, b: Plan) -> list[Move]:
    """Return the sites that are held otherwise, matched by tensor and kind, in the first plan's order."""
    there = {(s.tensor, s.kind): s for s in b.sites}
    found = []
    for site in a.sites:
        other = there.get((site.tensor, site.kind))
        if other is None:
            continue
        has_other_way = other.way != site.way
        more = _waiting(b, other) - _waiting(a, site) if has_other_way else _bytes(other) - _bytes(site)
        if other.held_as != site.held_as or (has_other_way and more):
            found.append(Move(site, other, more, _why(a, b, site, other)))
    return found


def differences(a: Plan, b: Plan) -> Iterator[str]:
    """Yield one line for each difference, except the versions that wrote the plans."""
    ours, theirs = a.to_dict(), b.to_dict()
    for name in {**ours, **theirs}:
        before, after = (data.get(name, getattr(plan, name)) for plan, data in ((a, ours), (b, theirs)))
        is_unknown = name == "model" and "" in (before, after)
        if name not in (*_TABLES, *_VERSIONS, "saved") and before != after and not is_unknown:
            yield f"{name}: {_changed(before, after)}"
    found = moves(a, b)
    for move in found:
        s = move.before
        where = one_line(place(s.kind, f"group {s.group}", s.module, s.source))
        formats = f"{held_as(s)} -> {held_as(move.after)}"
        yield f"{one_line(s.tensor)} ({where}): {formats}, {move.bytes:+,} bytes: {move.why}"
    yield from _unmatched(a, b, "only in the first")
    yield from _unmatched(b, a, "only in the second")
    for table in _TABLES:
        yield from _changed_rows(table, ours[table], theirs[table])
    if found:
        yield f"{len(found)} tensors moved, {sum(m.bytes for m in found):+,} bytes"


def held_as(site: Site) -> str:
    """Return how a site's tensor gets to backward: its format, and where it is if not in the device's memory."""
    if site.way == "recompute":
        return WAYS_SAID[site.way]
    return f"{site.held_as} {WAYS_SAID[site.way]}" if site.way == "offload" else site.held_as


def _changed(before: object, after: object) -> str:
    """Return two values in one line; of objects, the entries that differ, lists in them by name alone."""
    if not isinstance(before, dict) and not isinstance(after, dict):
        return f"{_value(before)} -> {_value(after)}"
    ours, theirs = (value if isinstance(value, dict) else {} for value in (before, after))
    said = []
    for name in {**ours, **theirs}:
        a, b = ours.get(name), theirs.get(name)
        if a != b:
            is_list = isinstance(a, list) or isinstance(b, list)
            said.append(f"{name} differs" if is_list else f"{name} {_changed(a, b)}")
    return one_line(", ".join(said))


def _value(value: object) -> str:
    if value is None or value in ("", []):
        return "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return one_line("; ".join(map(str, value)) if isinstance(value, list) else str(value))


def data(a: Plan, b: Plan) -> dict[str, Any]:
    """Return the tensors that are held otherwise as rows, ``bytes`` as in `Move`, and all lines of `differences`."""
    rows = [
        {name: getattr(move.before, name) for name in ("tensor", "kind", "module", "source", "group")}
        | {"before": held_as(move.before), "after": held_as(move.after), "bytes": move.bytes, "why": move.why}
        for move in moves(a, b)
    ]
    return {"moved": rows, "differences": list(differences(a, b))}


def _changed_rows(table: str, ours: list[_Row], theirs: list[_Row]) -> Iterator[str]:
    """Yield a line for each of the first `_SHOWN` rows that differ in fields not reported yet."""
    said = set(_SAID) if table == "sites" else set()
    if len(ours) != len(theirs):
        yield f"{table}: {len(ours)} -> {len(theirs)}"
        said.add("id")  # ids shift with every new row
    name, there = _NAMES[table], {_NAMES[table](row): row for row in theirs}
    lines = []
    for row in ours:
        other = there.get(name(row), row)
        fields = [k for k in {**row, **other} if row.get(k) != other.get(k) and k not in said]
        if fields:
            changes = ", ".join(f"{k} {_changed(row.get(k), other.get(k))}" for k in fields)
            lines.append(f"{one_line(name(row))}: {changes}")
    yield from lines[:_SHOWN]
    if len(lines) > _SHOWN:
        yield f"{table}: {len(lines) - _SHOWN} more with other fields"


def _unmatched(a: Plan, b: Plan, where: str) -> Iterator[str]:
    known = {(s.tensor, s.kind) for s in b.sites}
    for site in a.sites:
        if (site.tensor, site.kind) not in known:
            yield f"{one_line(site.tensor)} ({site.kind}, group {site.group}): {where}, {site.stored_as}"


def _waiting(plan: Plan, site: Site) -> int:
    """Return the bytes of a site's copies that wait for backward in the device's memory."""
    return sum(row.bytes for row in plan.saved if row.site == site.id and not row.on_host)


def _bytes(site: Site) -> int:
    fmt = find(site.stored_as)
    return fmt.num_bytes(site.elements) if isinstance(fmt, BlockFormat) else -(-site.elements * fmt.bits // 8)


def _why(a: Plan, b: Plan, before: Site, after: Site) -> str:
    for plan, site in ((b, after), (a, before)):
        if site.promoted_at is not None:
            return f"promoted at step {site.promoted_at} of the {'second' if plan is b else 'first'}"
    if before.way != after.way:
        return f"chosen under a peak budget of the {'second' if after.way else 'first'}"
    was, now = before.group in a.low_groups, after.group in b.low_groups
    if was != now:
        return f"group {after.group} is {'low' if now else 'high'} in the second"
    return "other recipe" if a.recipe != b.recipe else "chosen for this tensor (policy, keep_high or an edited plan)"
