"""Change a plan at the beginning of a step, by statistics, another graph or a schedule, and compile the graph again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxprec.config.recipes import Recipe
from fxprec.driver.event_log import EventLog
from fxprec.errors import ConfigError, first_line
from fxprec.plan import Plan
from fxprec.plan.compare import low_groups_with
from fxprec.plan.plan import latest_of_gemms
from fxprec.runtime.controller import Controller, describe

if TYPE_CHECKING:
    from fxprec.driver.graph import PlannedGraph
    from fxprec.driver.model import Model

log = logging.getLogger(__name__)
MAX_GIVEN_UP = 3
"""Failed promotions after which the graph tries no more: each attempt takes as long as a compilation."""


@dataclass
class HighOperands:
    """The step from which on operands are multiplied in ``hi``: the recipe's (`Operands.high_after`), or the user's."""

    recipe: Recipe
    when: Callable[[int], bool] | None = None
    """The user's function of the step that begins; the first True holds operands high from this step on."""
    asked_in: int | None = None
    """The step in which ``when`` was True."""

    def ask(self, when: Callable[[int], bool] | None) -> None:
        """Hold operands high from the first step on for which ``when`` is True; None: from the next step on.

        Raises `ConfigError` if the recipe rounds no operands to blocks.
        """
        if self.recipe.operands is None:
            raise ConfigError(
                f"recipe {self.recipe.name!r} multiplies no operands in blocks, so there are none to hold high; this "
                "is for recipes such as 'mxfp8' and 'nvfp4'"
            )
        self.when = when or (lambda step: True)

    def asked_since(self, step: int) -> str | None:
        """Ask the user's function about the training step that begins, and return what `since` does."""
        if self.asked_in is None and self.when is not None and self.when(step):
            self.asked_in = step
        return self.since(step)

    def since(self, step: int) -> str | None:
        """Return since when operands are high in a training step, for plans and events; None while they are not."""
        operands = self.recipe.operands
        if operands is not None and 0 < operands.high_after < step:
            return f"after step {operands.high_after}"
        return None if self.asked_in is None else f"since step {self.asked_in}, as asked"


class PlanChanges:
    """Makes the code of one graph follow its plan.

    A change that does not compile does not end training: the old code runs on, with a warning and an event. Under
    ``strict`` that is a `FallbackError`.
    """

    def __init__(self, graph: PlannedGraph, model: Model, events: EventLog) -> None:
        self._graph, self._model, self._log = graph, model, events
        self._followed: Plan | None = None  # the training plan that this inference graph follows
        self._keeps_operands = False  # recompiling with operands in hi failed, so they stay in blocks
        self._num_given_up = 0  # promotions that did not compile

    def follow(self, controller: Controller) -> None:
        """Compile the graph again where its plan, the plan that it follows or the recipe's schedule asks for that."""
        if not self._graph.is_training:
            self._follow_training(controller)
        self._hold_operands_high(controller)
        if controller.plan is not self._graph.compiled.plan:
            self._follow_plan(controller)

    def _follow_training(self, controller: Controller) -> None:
        """Give an evaluation graph the low groups and the promotions of the training plan."""
        trained = latest_of_gemms(self._model.training_plans(self._graph), controller.plan.gemms_by_name)
        if trained is None or trained is self._followed:
            return
        self._followed = trained
        borders = [(g.group_before, g.group_after) for g in controller.plan.gemms]
        if low_groups_with(trained, borders) != controller.plan.low_groups:
            failed = self._failure_to_compile("to round in evaluation as in training", None)
            if failed is not None:
                detail = f"evaluation keeps other tensors low than training: compiling failed ({failed})"
                self._log.tell(self._log.name, detail, step=controller.step)
        controller.promote_as(trained, "promoted in training")

    def _hold_operands_high(self, controller: Controller) -> None:
        """Recompile with GEMM operands in ``hi`` once the recipe or the user wants them so."""
        graph = self._graph
        in_force, high = graph.compiled.plan, self._model.high_operands
        since = high.asked_since(controller.step) if graph.is_training else high.since(self._model.steps_of_training)
        if since is None or in_force is None or self._keeps_operands or not any(map(any, in_force.operand_formats)):
            return
        hi = graph.compiler.settings.recipe.hi.name
        failed = self._failure_to_compile(f"for operands in {hi} {since}", controller.plan.with_high_operands(since))
        if failed is not None:
            self._keeps_operands = True
            detail = f"operands of GEMMs stay in blocks: compiling them in {hi} failed ({failed})"
            self._log.tell("block-gemms", detail, step=controller.step)

    def _follow_plan(self, controller: Controller) -> None:
        """Recompile for a changed plan in real storage. In ``simulate`` the scale table already has the change."""
        graph = self._graph
        in_force, is_in_code = graph.compiled.plan, not graph.compiler.settings.is_simulated
        if in_force is not None and is_in_code and controller.plan.formats != in_force.formats:
            failed = self._failure_to_compile("for the changed plan", controller.plan)
            if failed is not None:
                self._give_up(in_force, controller, failed)
        graph.realize(controller.plan)

    def _failure_to_compile(self, why: str, given: Plan | None) -> str | None:
        """Compile again. Return None, or in one line why that failed; the old code then stays."""
        try:
            self._graph.compile_again(why, given)
        except Exception as error:  # Inductor may raise anything
            log.info("compiling again failed", exc_info=error)
            return first_line(error)
        return None

    def _give_up(self, plan: Plan, controller: Controller, failed: str) -> None:
        """Return to the plan of the running code, with a warning: tensors promoted since stay low for good."""
        refused = controller.stay_with(plan)
        self._num_given_up += 1
        last = ""
        if self._num_given_up == MAX_GIVEN_UP:
            controller.rules = replace(controller.rules, promote_above=None)
            last = f"; this was attempt {MAX_GIVEN_UP}, the last for this graph"
        site = refused[0]
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        way_out = f"hold it high from the start with keep_high=({site.module!r},)" if site.module else "see the log"
        detail = (
            f"promoting it{more} to {controller.rules.hi} failed ({failed}): training continues with it in "
            f"{site.format}; {way_out}{last}"
        )
        self._log.tell(describe(site), detail, step=controller.step)
