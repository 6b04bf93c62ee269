"""Notices to the user. This module imports no pass, so that a start from the cache imports none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user asked for and did not get."""

    site: str  # node, module and source line
    detail: str


def raised(wanted: int, high: int) -> str:
    """Return a budget in bytes, and as a share of ``high``, the bytes at the peak with everything kept (0: unknown)."""
    return readable(wanted) + (f", {-(-100 * wanted // high)}%" if high else "")


def readable(size: int) -> str:
    """Return ``"1.50 GiB (1610612736 bytes)"``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit} ({size} bytes)"
    return f"{size} bytes"
