"""Notices to the user. This module imports no pass, because a start from the cache must not import any."""

from __future__ import annotations

from dataclasses import dataclass

SMALLER_BATCH = "take a smaller batch"
STEP_IN_BACKWARD = "give option optimizer, one of fxprec.optim, which steps in backward and frees each gradient"


@dataclass(frozen=True, slots=True)
class Notice:
    """A setting that the user asked for and did not get."""

    site: str  # node, module and source line
    detail: str


def budget_text(wanted: int, high: int) -> str:
    """Return a budget in bytes, and in percent of ``high``, the peak in bytes with every value saved (0: unknown)."""
    return readable(wanted) + (f", {-(-100 * wanted // high)}%" if high else "")


def hold_less(gradients: int, peak: int) -> str:
    """Return how to make a peak smaller. A smaller batch leaves the bytes of parameter gradients as they are."""
    return STEP_IN_BACKWARD if 2 * gradients > peak else SMALLER_BATCH


def readable(size: int) -> str:
    """Return ``"1.50 GiB (1610612736 bytes)"``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit} ({size} bytes)"
    return f"{size} bytes"
