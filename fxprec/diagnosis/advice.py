"""What to do: options that keep the gradients' error below a tolerance, and what they save and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fxprec.diagnosis.adjoint import combined
from fxprec.diagnosis.rounding import bits_of
from fxprec.diagnosis.rows import Row, plain
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.selection import covers

TOLERANCE = 0.1  # about 0.995 of cosine: what 50 architectures lose in bf16 at worst (docs/policies.md)
WORTHWHILE = 0.25  # of the bytes that all low would save; for less, 16 bits are the simpler answer


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Options to paste, and why these. Bytes are those saved for backward."""

    options: Mapping[str, Any]
    reason: str
    predicted: float
    """Damage of the step with these options."""
    bytes_all_high: int
    bytes_as_planned: int
    bytes_recommended: int
    kept: tuple[int, ...] = field(default=(), repr=False)
    """Positions of the rows held high."""

    def to_dict(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in asdict(self).items() if name != "kept"}


def advise(rows: Sequence[Row], hi: Format, base: Mapping[str, Any], tolerance: float = TOLERANCE) -> Advice:
    """Hold modules high, the most harmful tensor's first, until the rest keeps to the tolerance."""
    patterns: list[str] = []
    kept: set[int] = set()
    stuck = ""
    while not stuck and (total := _total(rows, kept, hi)) > tolerance:
        worst = max(
            (i for i in range(len(rows)) if i not in kept and _is_low(rows[i], hi)), key=_by(rows), default=None
        )
        if worst is None:
            stuck = f"in {hi.name} alone its gradients are off by {total:.2g}"
        elif not rows[worst].module:
            stuck = f"{rows[worst].tensor}, the worst of them, belongs to no module that keep_high could name"
        else:
            patterns.append(rows[worst].module)
            kept |= {i for i, row in enumerate(rows) if covers(rows[worst].module, row.module)}
    return _advice(rows, hi, base, tolerance, patterns, kept, stuck)


def _advice(
    rows: Sequence[Row],
    hi: Format,
    base: Mapping[str, Any],
    tolerance: float,
    patterns: Sequence[str],
    kept: set[int],
    stuck: str,
) -> Advice:
    low = [i for i, row in enumerate(rows) if _is_low(row, hi)]
    high_bytes, planned, recommended = (_bytes(rows, held, hi) for held in (set(low), set[int](), kept))
    saved = (high_bytes - recommended) / max(high_bytes - planned, 1)
    whole, left = _total(rows, set(), hi), _total(rows, kept, hi)
    numbers = {"bytes_all_high": high_bytes, "bytes_as_planned": planned}
    everything = tuple(low)
    if not low:
        options, reason, held = dict(base), "nothing is stored low: there is nothing to gain or to lose", set[int]()
    elif stuck.startswith(f"in {hi.name} alone"):
        options, reason, held = {"recipe": "fp32"}, f"stay in float32: {stuck}, above {tolerance:g}", set(everything)
    elif stuck or saved < WORTHWHILE:
        why = stuck or f"only {saved:.0%} of the bytes that 8 bits would save are left once the rest is held high"
        options, reason, held = (
            {"recipe": "bf16"},
            f"stay in bf16: gradients would be off by {whole:.2g}, and {why}",
            set(everything),
        )
    elif patterns:
        more = tuple(base.get("keep_high", ())) if base.get("keep_high") != "ends" else ()
        options = {**base, "keep_high": (*more, *patterns)}
        reason = f"gradients are off by {whole:.2g} as planned, by {left:.2g} with these modules high"
        held = kept
    else:
        options, reason, held = (
            dict(base),
            f"gradients are off by {whole:.2g}, below {tolerance:g}: all of it may be low",
            kept,
        )
    return Advice(
        options=options,
        reason=reason,
        predicted=_total(rows, held, hi),
        bytes_recommended=_bytes(rows, held, hi),
        kept=tuple(sorted(held)),
        **numbers,
    )


def _by(rows: Sequence[Row]) -> Any:
    return lambda i: (rows[i].damage, rows[i].planned.error)


def _is_low(row: Row, hi: Format) -> bool:
    return bits_of(row.format) < hi.bits


def _total(rows: Sequence[Row], kept: set[int], hi: Format) -> float:
    return combined({i: (row.costs[hi.name].damage if i in kept else row.damage) for i, row in enumerate(rows)})


def _bytes(rows: Sequence[Row], kept: set[int], hi: Format) -> int:
    return sum(int(row.elements * (hi.bits if i in kept else bits_of(row.format))) // 8 for i, row in enumerate(rows))
