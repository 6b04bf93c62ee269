"""List the tensors that a plan saves for backward: lines for a terminal, data for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fxprec.plan.lines import aligned
from fxprec.plan.rows import ByteCount, Group, SavedTensor

if TYPE_CHECKING:
    from fxprec.plan.plan import Plan

SHOWN = 40  # number of tensors in a text, the largest ones; JSON has all
_HEAD = ("bytes", "in bf16", "in float32", "format", "tensor", "module", "source")
_TITLE = "held for backward, largest first (inputs and parameters of the graph are in memory anyway and do not count):"
_GROUPS = "by group, the tensors between two matrix products (asked: what the policy chose for the group as a whole):"


def lines(plan: Plan) -> list[str]:
    """Return a table of the tensors saved for backward with their total, then one line per group."""
    if not plan.saved:
        return [_nothing(plan.saved_bytes)]
    rows = sorted(plan.saved, key=lambda row: -row.bytes)
    table = [_HEAD, *map(_cells, rows[:SHOWN])]
    if rows[SHOWN:]:
        table.append((*_sizes(rows[SHOWN:]), "", f"{len(rows) - SHOWN} smaller ones; --json has all", "", ""))
    table.append((*_sizes(rows), "", "together", "", ""))
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    right = [(*(row[i].rjust(width) for i, width in enumerate(widths)), *row[3:]) for row in table]
    return [_TITLE, *(f"  {line}" for line in aligned(right).split("\n")), _GROUPS, *_groups(plan)]


def data(plan: Plan) -> dict[str, Any]:
    """Return the tensors saved for backward and the groups as plain data; sizes in bytes."""
    rows = [
        {
            **{name: getattr(row, name) for name in ("tensor", "module", "source", "format")},
            **{name: getattr(row, name) for name in ("bytes", "bf16", "fp32", "elements", "group", "site", "on_host")},
        }
        for row in plan.saved
    ]
    groups = [
        {"id": group.id, "asked": _asked(group), "bytes": group.saved_bytes, "formats": _formats(_of(plan, group))}
        for group in plan.groups
    ]
    total = plan.saved_bytes and {name: getattr(plan.saved_bytes, name) for name in ("planned", "bf16", "fp32")}
    return {"saved": rows, "groups": groups, "total": total}


def _nothing(count: ByteCount | None) -> str:
    if count is None:
        return "held for backward: nothing, since the graph has no backward half"
    if count.planned == count.fp32 == 0:
        return "held for backward: nothing but inputs and parameters of the graph"
    return "held for backward: this plan does not list its tensors; compile, or fxprec dump, with this version"


def _cells(row: SavedTensor) -> tuple[str, ...]:
    where = " (host memory)" if row.on_host else ""
    copied = " (a parameter's copy)" if row.elements and not row.fp32 else ""
    return *_sizes([row]), row.format + where, row.tensor + copied, row.module, row.source


def _sizes(rows: Sequence[SavedTensor]) -> tuple[str, str, str]:
    held = sum(row.bytes for row in rows if not row.on_host)
    return f"{held:,}", f"{sum(row.bf16 for row in rows):,}", f"{sum(row.fp32 for row in rows):,}"


def _groups(plan: Plan) -> Iterable[str]:
    for group in plan.groups:
        rows = _of(plan, group)
        if not rows:
            yield f"  group {group.id}, asked {_asked(group)}: nothing"
            continue
        formats = ", ".join(f"{count} in {name}" for name, count in _formats(rows).items())
        places = list(dict.fromkeys(row.module or row.source or row.tensor for row in rows))
        named = ", ".join(places[:4]) + (", ..." if places[4:] else "")
        yield f"  group {group.id}, asked {_asked(group)}: {_sizes(rows)[0]} bytes, {formats}; {named}"


def _of(plan: Plan, group: Group) -> list[SavedTensor]:
    return [row for row in plan.saved if row.group == group.id]


def _asked(group: Group) -> str:
    return "low" if group.low else "high"


def _formats(rows: Iterable[SavedTensor]) -> dict[str, int]:
    return dict(Counter(row.format for row in rows).most_common())
