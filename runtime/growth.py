"""Tell when attention's largest logit grows: softmax saturates, then its gradients vanish or blow up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

LIMIT = 100.0
"""Logits above it are clipped where attention is trained with QK-Clip (arXiv 2507.20534, tau)."""
RISE = 2.0
"""Over the median of the first looks: a trained model that has large logits all along is no news."""
FIRST = 5  # looks
KEPT = 200  # looks of which the numbers are kept


@dataclass
class Growth:
    """The largest logits of one attention, by step."""

    looks: list[tuple[int, float]] = field(default_factory=list)
    """(step, largest magnitude), oldest first."""
    _first: list[float] = field(default_factory=list)
    _told: float = 0.0

    def note(self, step: int, largest: float) -> str | None:
        """Take a look; return what to tell: once above `LIMIT` and `RISE`, then at each doubling of what was told."""
        if not math.isfinite(largest):
            return None  # what holds an inf or a NaN is told of elsewhere
        if len(self._first) < FIRST:
            self._first.append(largest)
        self.looks = [*self.looks, (step, largest)][-KEPT:]
        usual = median(self._first)
        if largest < max(LIMIT, RISE * usual, 2 * self._told):
            return None
        self._told = largest
        return f"the largest logit is {largest:.3g} at step {step}, and was {usual:.3g} at first{self._doubling()}"

    def _doubling(self) -> str:
        """Say in how many steps it doubled last, or nothing where it did not within the looks."""
        step, largest = self.looks[-1]
        half = next((at for at, value in reversed(self.looks) if value <= largest / 2), None)
        return "" if half is None else f"; it doubled in {step - half} steps"
