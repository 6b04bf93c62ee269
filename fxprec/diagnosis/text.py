"""A diagnosis as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxprec.diagnosis.rows import Check, GroupRow
from fxprec.plan.lines import aligned, one_line

if TYPE_CHECKING:
    from fxprec.diagnosis.diagnosis import Diagnosis

SHOWN = 12
FIRST = 3  # groups to keep high first
FREE = 0.1  # of the mean group's share of the damage: a group below it is free to be low


def text(found: Diagnosis) -> str:
    """Return the text of a diagnosis: the worst tensors, the groups, the check, the recommendation."""
    gemms = [_gemms(found)] if found.gemms else []
    parts = [_head(found), _tensors(found), _groups(found), *gemms, _checked(found), _advice(found)]
    parts += ["Not seen\n" + "\n".join(f"  {one_line(note)}" for note in found.notes)] if found.notes else []
    return "\n\n".join(parts)


def _head(found: Diagnosis) -> str:
    return (
        f"{one_line(found.model)}: loss {found.loss:.6g}, {len(found.ranking)} stored tensors in {len(found.groups)} "
        f"groups, {found.seconds:.1f} s"
    )


def _tensors(found: Diagnosis) -> str:
    lines = [("site", "tensor", "module", "source", "format", "damage", "why")]
    for row in found.ranking[:SHOWN]:
        lines.append((str(row.site), row.tensor, row.module, row.source, row.format, f"{row.damage:.2g}", row.reason))
    more = len(found.ranking) - SHOWN
    return "Worst tensors as planned (damage: relative error of the gradients)\n" + aligned(lines) + _more(more)


def _more(count: int) -> str:
    return f"\n... and {count} more" if count > 0 else ""


def _groups(found: Diagnosis) -> str:
    lines = [("group", "modules", *found.formats)]
    for group in found.groups[:SHOWN]:
        lines.append((group.name, modules(group), *(f"{group.damages[f]:.2g}" for f in found.formats)))
    worst = ", ".join(g.name for g in first_groups(found.groups))
    first = "Keep high first" if found.advice.holds_high else "Most of the damage, still within the tolerance"
    said = f"{first}: {worst}." if worst else ""
    free = free_groups(found.groups)
    said += f" Free: {', '.join(g.name for g in free[:SHOWN])}{' ...' if len(free) > SHOWN else ''}." if free else ""
    return f"Groups, damage by format\n{aligned(lines)}{_more(len(found.groups) - SHOWN)}\n{said.strip()}"


def _gemms(found: Diagnosis) -> str:
    lines = [("gemm", "module", "weight's elements", "damage")]
    for row in found.gemms[:SHOWN]:
        lines.append((str(row.gemm), row.module, f"{row.elements:,}", f"{row.damage:.2g}"))
    head = "GEMMs with operands in blocks, each alone rounded and re-run\n"
    return head + aligned(lines) + _more(len(found.gemms) - SHOWN)


def modules(group: GroupRow) -> str:
    """Return a group's modules, shortened; for tensors without a module, their source lines."""
    shown = ", ".join(group.modules[:3])
    return shown + (f" and {len(group.modules) - 3} more" if len(group.modules) > 3 else "")


def first_groups(groups: Sequence[GroupRow]) -> list[GroupRow]:
    """Return the groups to keep high first, worst first, without free ones."""
    free = free_groups(groups)
    return [g for g in groups[:FIRST] if g not in free]


def free_groups(groups: Sequence[GroupRow]) -> list[GroupRow]:
    """Return the groups whose share of the squared damage is negligible; squares of damages add up."""
    mean = sum(g.damage**2 for g in groups) / max(len(groups), 1)
    return [g for g in groups if g.damage**2 <= FREE * mean]


def _checked(found: Diagnosis) -> str:
    lines: list[tuple[str, ...]] = [("re-run", "predicted", "measured", "change of progress, predicted", "measured")]
    lines += [_check(check) for check in (*found.checks, *found.whole)]
    ranks = "" if found.spearman is None else f" (Spearman {found.spearman:.3f} over {len(found.checks)} groups)"
    return f"Prediction checked: only these low, all else exact{ranks}\n{aligned(lines)}"


def _check(c: Check) -> tuple[str, ...]:
    return (
        c.name,
        f"{c.predicted:.3g}",
        f"{c.measured:.3g}",
        f"{c.predicted_progress:+.2%}",
        f"{c.measured_progress:+.2%}",
    )


def _advice(found: Diagnosis) -> str:
    a = found.advice
    size = f"{megabytes(a.bytes_recommended)} stored for backward; all high {megabytes(a.bytes_all_high)}, as planned "
    return f"Recommended\n  options={found.recommended!r}\n  {a.reason}\n  {size}{megabytes(a.bytes_as_planned)}"


def megabytes(number: int) -> str:
    """Return a number of bytes as text."""
    return f"{number / 1e6:,.1f} MB" if number >= 1e5 else f"{number:,} bytes"
