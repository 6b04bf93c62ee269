"""Find the budget that a `BudgetError` names as enough, by compiling within it.

A plan predicts what compiled code holds, and the code may hold a little more. So before a budget is named, the graph is
compiled within it. The code is not run. Inductor's cache keeps it for the run that is given the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fxprec.config.settings import PeakBudget
from fxprec.driver.attempts import PeakAttempts, SavedAttempts
from fxprec.driver.compiler import Compiler
from fxprec.driver.event_log import EventLog
from fxprec.driver.lowering import Lowering
from fxprec.driver.progress import say
from fxprec.errors import BudgetError
from fxprec.passes.notice import budget_text, readable
from fxprec.runtime.stats import StatsQueue

_TRIALS = 6
_TRIALS_ON_GPU = 2  # a graph compiles for minutes there; what was planned and allocated differed by 0.5 % at most
_EXACT = 3  # trials of what the trial before says; later ones add a share to it
_SHARE = 0.01


class _QuietLog(EventLog):
    """A log of what nobody runs."""

    def warn(self, message: str) -> None:
        """Do nothing."""


def can_confirm(compiler: Compiler, error: BudgetError) -> bool:
    """Return whether compiling shows if the budget that ``error`` names is enough."""
    plans_only = compiler.dump is not None and compiler.dump.plan_only
    is_measured = compiler.lowering.name != "eager" and not compiler.lowering.is_interpreted
    return bool(error.enough) and compiler.confirms and is_measured and not plans_only and not compiler.peak.part.shares


def confirmed(error: BudgetError, compiler: Compiler, compile_graph: Callable[[Compiler], object]) -> BudgetError:
    """Return the error with a budget within which ``compile_graph`` succeeds; as it is if compiling fails otherwise."""
    wanted = error.enough
    say(f"peak_budget {error.asked} is out of reach; compiling within {readable(wanted)} to see if that is enough")
    for trial in range(_TRIALS if compiler.lowering.device.type == "cpu" else _TRIALS_ON_GPU):
        try:
            compile_graph(_within(compiler, wanted))
        except BudgetError as again:
            more = int(_SHARE * wanted) if trial >= _EXACT else 1
            wanted = max(again.enough, wanted + more)
        except Exception:  # what it is shows when the budget is given
            return error
        else:
            break
    return error if wanted == error.enough else _naming(error, wanted)


def _within(compiler: Compiler, budget: int) -> Compiler:
    """Return a compiler for another peak budget that changes nothing of the given one's."""
    log, asked = _QuietLog(compiler.log.name, strict=False), compiler.settings.peak_budget
    in_bytes = asked is not None and asked.has_libraries and not asked.is_share
    settings = replace(compiler.settings, peak_budget=PeakBudget(budget, has_libraries=in_bytes))
    return replace(
        compiler,
        settings=settings,
        lowering=Lowering(settings.asked, compiler.lowering.device, log.notice),
        budget=SavedAttempts(settings, log),
        peak=PeakAttempts(log),
        log=log,
        tried=[],
        queue=StatsQueue(),
        dump=None,
        recorder=None,
        tensors=None,
        numerics=None,
        memory=None,
        updates=compiler.updates if compiler.recorder is None else None,
        confirms=False,
    )


def _naming(error: BudgetError, wanted: int) -> BudgetError:
    found, said = f"{error.found}, and {readable(wanted)} as compiled", f"to {budget_text(wanted, error.high)}"
    return BudgetError.of_peak(error.asked, found, wanted, said, error.ways, high=error.high)
