"""Holding a step as it is compiled to ``peak_budget``: a plan predicts its peak, the compiled halves show it."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from fxprec.config import Settings
from fxprec.driver.event_log import EventLog
from fxprec.driver.saved_budget import PlanAgain
from fxprec.errors import BudgetError
from fxprec.passes.analysis.peak.part import Part
from fxprec.passes.analysis.peak.reserve import enough_for
from fxprec.passes.notice import Notice, readable
from fxprec.plan import PeakBytes

ATTEMPTS = 5  # plans made for one budget, each compiled; the second nearly always fits


class Looked(Exception):
    """Ends a compilation once the passes have run: what they found of other budgets was wanted alone."""

    def __init__(self, peak: PeakBytes | None) -> None:
        super().__init__(peak)
        self.peak = peak


class PeakBudget:
    """The budget of one graph, and what its plans turned out to hold."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.part = Part()
        self.only_looks = False
        self.tried: list[tuple[int, int]] = []
        """Of each plan made for the budget, the bytes it predicts, and holds as compiled."""
        self._told = 0  # bytes above the budget, of a plan that was given

    def take(self, part: Part) -> None:
        """Plan for another part of the budget from now on."""
        self.part, self.tried = part, []

    def hold(self, planned: PeakBytes, held: int, waiting: int) -> PeakBytes:
        """Return the peak as compiled, and what waits between the halves.

        Raises `PlanAgain` where that is above the budget, at last `BudgetError`.
        """
        self.tried.append((planned.planned, held))
        is_within = held <= planned.room and waiting <= self.part.waiting
        if is_within or self.part.is_provisional:
            return replace(planned, compiled=held, waiting=waiting)
        least = min(held for _, held in self.tried)
        if len(self.tried) == ATTEMPTS:
            beside = f", {readable(planned.beside)} of it for other graphs" if planned.beside else ""
            beside += f", {readable(planned.reserved)} of it for libraries" if planned.reserved else ""
            wanted = least + planned.beside
            if planned.reserved:
                wanted = enough_for(least - planned.room, planned.budget)
            raise BudgetError(
                f"peak_budget is {readable(planned.budget)}{beside}, and of {ATTEMPTS} plans made for it the best "
                f"holds {readable(least)} as compiled; raise it to {readable(wanted)} or take a "
                "smaller batch"
            )
        assert planned.waiting is not None
        part = self.part
        if held > planned.room:
            part = replace(part, beyond=part.beyond + held - planned.planned)
        if waiting > part.waiting:
            part = replace(part, beyond_waiting=part.beyond_waiting + waiting - planned.waiting)
        self.part = part
        detail = f"a plan that predicts {readable(planned.planned)} at the peak holds {readable(held)} as compiled"
        self.log.note("replanned", self.log.name, f"{detail}; planned again within {readable(planned.room)}")
        raise PlanAgain

    def tell(self, planned: PeakBytes, held: int, step: int) -> PeakBytes:
        """A plan that was given, or promoted, goes before the budget: it is said, and ends no run."""
        if held > max(planned.room, self._told):
            self._told = held
            detail = f"the step holds {readable(held)} since tensors were promoted, or as the given plan wants"
            self.log.warn(f"peak_budget {readable(planned.budget)}: {detail}")
            self.log.note("fallback", self.log.name, detail, step=step)
        return replace(planned, compiled=held)


def beyond_machine(settings: Settings, device: torch.device) -> Notice | None:
    """Say where a budget is more memory than the device has: nothing is bound by it."""
    asked = None if settings.peak_budget is None else settings.peak_budget.asked
    most = _memory(device)
    if not isinstance(asked, int) or most is None or asked <= most:
        return None
    detail = f"{device.type} has {readable(most)}; give it less than that, or a share of the step's peak such as '60%'"
    return Notice(f"peak_budget {readable(asked)}", detail)


def _memory(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has, where that is known."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
