"""Report when attention's largest logit grows: softmax saturates, then its gradients vanish or blow up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

LIMIT = 100.0
"""Smaller logits are not reported. QK-Clip (arXiv 2507.20534, tau) clips logits above this number."""
RISE = 2.0
"""Least factor over the median of the first looks: a trained model may have large logits from the start."""
FIRST = 5  # looks that define the usual logit
KEPT = 200  # latest looks that are kept


@dataclass
class Growth:
    """The largest logits of one attention, by step."""

    looks: list[tuple[int, float]] = field(default_factory=list)
    """(step, largest magnitude of the logits) of each step that was inspected, oldest first."""
    _first: list[float] = field(default_factory=list)
    _told: float = 0.0

    def note(self, step: int, largest: float) -> str | None:
        """Add a look; return a report once a logit passes `LIMIT` and `RISE`, then at each doubling, else None."""
        if not math.isfinite(largest):
            return None  # infs and NaNs are reported elsewhere
        if len(self._first) < FIRST:
            self._first.append(largest)
        self.looks = [*self.looks, (step, largest)][-KEPT:]
        usual = median(self._first)
        if largest < max(LIMIT, RISE * usual, 2 * self._told):
            return None
        self._told = largest
        return f"the largest logit is {largest:.3g} at step {step}, and was {usual:.3g} at first{self._doubling()}"

    def _doubling(self) -> str:
        """Return text that says in how many steps the logit last doubled; "" if it did not within the kept looks."""
        step, largest = self.looks[-1]
        half = next((at for at, value in reversed(self.looks) if value <= largest / 2), None)
        return "" if half is None else f"; it doubled in {step - half} steps"
