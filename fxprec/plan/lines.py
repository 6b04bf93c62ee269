"""Lines of text: a tensor's place in the user's model, names escaped, rows as columns.

A leaf, since passes, runtime and plan, which must not import each other, name a place in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

_WIDEST = 60  # characters of a cell


def place(*parts: str) -> str:
    """Return the known ones of module, source line and other parts, with commas between: ``layers.0, model.py:7``."""
    return ", ".join(part for part in parts if part)


def named(name: str, *parts: str) -> str:
    """Return ``name (layers.0, model.py:7)`` of the known parts of a place; the name alone where none is known."""
    where = place(*parts)
    return f"{name} ({where})" if where else name


def one_line(text: str) -> str:
    """Escape characters that would end a line: names come from the user's model."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of text as columns; the last one is never cut."""
    cut = [[*(_cut(one_line(c)) for c in line[:-1]), one_line(line[-1])] for line in lines]
    widths = [max(len(line[i]) for line in cut) for i in range(len(cut[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cut)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."
