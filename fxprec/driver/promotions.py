"""Promotions that could not be made real: the code that runs stays, and its plan."""

from __future__ import annotations

import logging
from dataclasses import replace

from fxprec.passes.notice import Notice
from fxprec.plan import Plan
from fxprec.runtime.controller import Controller, describe

log = logging.getLogger(__name__)
# Promotions that did not compile after which no more are tried: each attempt costs as much as a compilation.
MAX_GIVEN_UP = 3


class GivenUp:
    """Counts the attempts of one graph."""

    def __init__(self) -> None:
        self._attempts = 0

    def stay_with(self, plan: Plan, controller: Controller, error: Exception) -> Notice:
        """Keep the plan of the code that runs: what was promoted since stays low, for good. Return what to tell."""
        log.info("a promotion did not compile", exc_info=error)
        refused = controller.stay_with(plan)
        self._attempts += 1
        last = ""
        if self._attempts == MAX_GIVEN_UP:
            controller.rules = replace(controller.rules, promote_above=None)
            last = f"; that was attempt {MAX_GIVEN_UP}, no more are made for this graph"
        site = refused[0]
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        way_out = f"hold it high from the start with keep_high=({site.module!r},)" if site.module else "see the log"
        detail = (
            f"promoting it{more} to {controller.rules.hi} failed ({in_one_line(error)}): training goes on with "
            f"it in {site.format}; {way_out}{last}"
        )
        return Notice(describe(site), detail)


def in_one_line(error: Exception) -> str:
    """Return an exception's type and the first line of its text."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
