"""Format lines of text: a tensor's place in the user's model, escaped names, and rows as columns.

This module imports nothing of fxprec, so passes, runtime and plan can all use it without importing each other.
"""

from __future__ import annotations

from collections.abc import Sequence

_WIDEST = 60  # characters per cell


def place(*parts: str) -> str:
    """Join the non-empty parts of a place (module, source line, ...) with commas: ``layers.0, model.py:7``."""
    return ", ".join(part for part in parts if part)


def named(name: str, *parts: str) -> str:
    """Return ``name (layers.0, model.py:7)`` with the non-empty parts of a place; only the name if all are empty."""
    where = place(*parts)
    return f"{name} ({where})" if where else name


def one_line(text: str) -> str:
    """Escape unprintable characters such as newlines, because names come from the user's model."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of text as columns; the last column is never truncated."""
    cut = [[*(_cut(one_line(c)) for c in line[:-1]), one_line(line[-1])] for line in lines]
    widths = [max(len(line[i]) for line in cut) for i in range(len(cut[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cut)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."
