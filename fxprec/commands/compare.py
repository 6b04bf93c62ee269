"""``fxprec compare``: where two runs part first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fxprec.report.streams import Comparison, Parting

_SHOWN = 12


def compare(
    a: Annotated[Path, typer.Argument(help="Dump folder of a run (options={'dump': DIR} while it trained).")],
    b: Annotated[Path, typer.Argument(help="Another run's, of the same model on the same batches.")],
    tolerance: Annotated[float, typer.Option(help="Relative, of largest magnitudes; 0: equal to the last bit.")] = 0.1,
) -> None:
    """Say where two runs' tensors part first, step by step. Exit code 1 where they do, 0 where not."""
    from fxprec.errors import ConfigError
    from fxprec.report.streams import compare_runs

    if not 0 <= tolerance < float("inf"):
        raise ConfigError(f"--tolerance is {tolerance}; give a relative difference of at least 0, such as 0.1")
    found = compare_runs(a, b, tolerance)
    print(_text(found))
    raise typer.Exit(int(bool(found.partings)))


def _text(found: Comparison) -> str:
    from fxprec.testing.finding import aligned

    lines = [f"{found.joined} tensors in both, {found.steps} steps"]
    for where, names in (("first", found.only_first), ("second", found.only_second)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"only in the {where}: {', '.join(names[:3])}{more}")
    lines += [f"the models differ: {text}" for text in found.differences]
    if not found.partings:
        return "\n".join([*lines, "they do not part"])
    first = found.partings[0]
    place = ", ".join(part for part in (first.site.module, first.site.source) if part)
    where = f"{first.site.tensor} ({place})" if place else first.site.tensor
    lines.append(f"they part first at step {first.step}, in {first.site.direction}: {where}")
    rows = [
        ("step", "tensor", "kind", "module", "formats", "what", "first", "second"),
        *map(_row, found.partings[:_SHOWN]),
    ]
    lines.append(aligned(rows))
    if len(found.partings) > _SHOWN:
        lines.append(f"... and {len(found.partings) - _SHOWN} more")
    return "\n".join(lines)


def _row(p: Parting) -> tuple[str, ...]:
    s = p.site
    formats = s.format if s.format == p.other.format else f"{s.format} / {p.other.format}"
    return (str(p.step), s.tensor, s.kind, s.module, formats, p.what, f"{p.ours:.4g}", f"{p.theirs:.4g}")
