"""Write a comparison of two runs as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxprec.plan.lines import aligned, named, one_line
from fxprec.report.runs import HALVES, Half

if TYPE_CHECKING:
    from fxprec.report.streams import Comparison, Pair, PartedPair

_SHOWN = 12


def text(found: Comparison) -> str:
    """Return a text that says where two runs first differ, and which tensors differ."""
    lines = [f"{len(found.pairs)} tensors in both, {len(found.steps)} steps"]
    for where, names in (("first", found.only_first), ("second", found.only_second)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"only in the {where}: {', '.join(map(one_line, names[:3]))}{more}")
    lines += map(one_line, found.differences)
    parted = found.partings
    if not parted:
        return "\n".join([*lines, "they do not differ" + (": every hash is equal" if found.bitwise else "")])
    lines.append(f"they first differ at step {parted[0].parting.step}, {first_of(parted[0])}")
    others = [pair for half in HALVES if (pair := found.first_in(half)) is not None and pair is not parted[0]]
    lines += [f"  then at step {pair.parting.step}, {first_of(pair)}" for pair in sorted(others, key=lambda p: p.order)]
    lines.append(
        aligned(
            [("step", "tensor", "kind", "module", "formats", "what", "first", "second"), *map(_row, parted[:_SHOWN])]
        )
    )
    if len(parted) > _SHOWN:
        lines.append(f"... and {len(parted) - _SHOWN} more")
    return "\n".join(lines)


def where(half: Half) -> str:
    """Return a half as a phrase."""
    return {
        "update": "in the weights after the previous update",
        "forward": "in forward",
        "backward": "in backward",
    }[half]


def first_of(pair: Pair) -> str:
    """Return the place of a pair as a phrase."""
    t = pair.ours
    return f"{where(pair.half)}: {one_line(named(t.tensor, t.module, t.source))}"


def _row(pair: PartedPair) -> tuple[str, ...]:
    t, p = pair.ours, pair.parting
    formats = t.format if t.format == pair.theirs.format else f"{t.format} / {pair.theirs.format}"
    return (str(p.step), t.tensor, t.kind, t.module, formats, p.what, _shown(p.ours), _shown(p.theirs))


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
