"""Show a plan in one line or as a table for a notebook: saved bytes, the peak, the number of tensors by bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from fxprec.config.ways import WAYS_SAID, Way
from fxprec.numerics.bits import BIT
from fxprec.plan.rows import PeakBytes

if TYPE_CHECKING:
    from fxprec.plan.plan import Plan

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_NONE = "no training step yet; the first one is planned and compiled"
_SIMULATED = "rounded numbers stay in float32, storage='packed' stores their codes"
_ROWS = 50  # number of tensors in a notebook's table


def line(plans: Sequence[Plan], graph: str = "", *, others: int = 0, uncompiled: Iterable[str] = ()) -> str:
    """Return one line on the saved bytes and the peak of a model's or a graph's plans, without unknown parts.

    ``others``: number of graphs that run in other steps. ``uncompiled``: clauses on code that runs uncompiled.
    """
    if not plans:
        return f"fxprec: {_NONE}"
    name = plans[0].recipe.name + (", simulated" if plans[0].storage == "simulate" else "")
    name += f", {graph}" if graph else ""
    name += ", evaluation" if all(plan.is_evaluation for plan in plans) else ""
    more = [f"{others} more graph{'s' if others > 1 else ''} for other inputs"] if others else []
    more += [_SIMULATED] if plans[0].storage == "simulate" else []
    return f"fxprec {name}: " + "; ".join([*parts(plans), *more, *uncompiled])


def parts(plans: Sequence[Plan]) -> list[str]:
    """Return the known facts of one model's plans: saved bytes, peak, tensors by bits, promotions."""
    promoted = sum(len(plan.promoted) for plan in plans)
    found = (_saved(plans), _peak(plans), _tensors(plans), f"{promoted} promoted" if promoted else "")
    return [text for text in found if text]


def _saved(plans: Sequence[Plan]) -> str:
    """Return a text on the bytes saved for backward, and those in bf16 and float32; "" if unknown."""
    counts = [plan.saved_bytes for plan in plans]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return "nothing is saved for backward" if counts and not known else ""
    totals = (sum(getattr(count, name) for count in known) for name in ("planned", "bf16", "fp32"))
    ours, bf16, float32 = _sizes(*totals)
    same = "the same tensors in " if any(plan.peak_bytes is not None for plan in plans) else ""  # others are recomputed
    return f"{ours} saved for backward ({same}bf16 {bf16.partition(' ')[0]}, float32 {float32.partition(' ')[0]})"


def _peak(plans: Sequence[Plan]) -> str:
    fullest = fullest_peak(plans)
    if fullest is None:
        return ""
    ours, whole, high = _sizes(fullest.held, fullest.room, fullest.high)
    predicted = "predicted " if fullest.compiled is None else ""
    all_kept = f"{high.partition(' ')[0]} with everything kept in {plans[0].recipe.hi.name}"
    return f"{predicted}peak {ours.partition(' ')[0]} of {whole} ({all_kept})"


def fullest_peak(plans: Sequence[Plan]) -> PeakBytes | None:
    """Return the peak of the graph that uses the largest share of its part of the budget; None without a budget."""
    peaks = [plan.peak_bytes for plan in plans if plan.peak_bytes is not None]
    return max(peaks, key=lambda peak: peak.held / max(peak.room, 1), default=None)


def _tensors(plans: Sequence[Plan]) -> str:
    """Return a text that counts tensors: saved by bits, recomputed, in host memory, and those no format changes."""
    saved = [row for plan in plans for row in plan.saved]
    stored = Counter(row.bits for row in saved if row.elements and not row.on_host)
    (bits, count), *more = sorted(stored.items()) or [(0, 0)]
    counts = [f"{count} tensor{'s' if count > 1 else ''} in {bits} bits"] if count else []
    counts += [f"{count} in {bits}" for bits, count in more]
    ways = Counter[str](site.way for plan in plans for site in plan.sites)
    counts += [f"{ways[way]} {WAYS_SAID[way]}" for way in _NOT_HELD if ways[way]]
    fixed = Counter(_kind(row.format) for row in saved if row.fp32 and not row.elements)
    counts += [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in sorted(fixed.items())]
    return ", ".join(counts)


def _kind(dtype: str) -> str:
    """Return a noun for a tensor that no format changes, by its dtype."""
    if dtype in ("bool", BIT.name):
        return "mask"
    return "complex tensor" if dtype.startswith("complex") else "integer tensor"


_NOT_HELD: tuple[Way, ...] = ("recompute", "offload")


def _sizes(*sizes: int) -> list[str]:
    """Return sizes as text, all in the unit of the smallest non-zero size, with three digits or more."""
    least = min((size for size in sizes if size), default=0)
    scale, unit = next(((s, u) for s, u in _UNITS if least >= s), _UNITS[-1])
    return [f"{_digits(size / scale) if scale > 1 else size} {unit}" for size in sizes]


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Return an HTML table; every cell is escaped, because names come from the user's model."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"] if head else []
    lines += [
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    ]
    return "<table>" + "".join(lines) + "</table>"


def html(plans: Sequence[Plan], title: str) -> str:
    """Return the facts of `line` as an HTML table, followed by a folded table of each plan's tensors."""
    found = [f"<b>{escape(title)}</b>", table([part] for part in parts(plans) or [_NONE])]
    for plan in plans:
        rows = [(s.tensor, s.kind, s.module or s.source, s.shape, s.stored_as, s.why) for s in plan.sites[:_ROWS]]
        more = f", the first {_ROWS}" if len(plan.sites) > _ROWS else ""
        summary = f"{len(plan.sites)} tensors in {len(plan.groups)} groups{more}"
        head = ("tensor", "kind", "module or line", "shape", "stored as", "why")
        found.append(f"<details><summary>{escape(summary)}</summary>{table(rows, head)}</details>")
    return "".join(found)
