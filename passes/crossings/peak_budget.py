"""Choose for a peak budget: the least time among choices that never exceed it."""

from __future__ import annotations

import math

from torch.fx import Node

from fxprec.config.settings import PeakBudget
from fxprec.errors import BudgetError
from fxprec.passes.analysis.joint import is_view_or_cast
from fxprec.passes.analysis.operators import Operator
from fxprec.passes.base import Work
from fxprec.passes.budget_part import Bound
from fxprec.passes.crossings.best_of import BestOf
from fxprec.passes.crossings.choice import Chooser
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.crossings.problem import Problem
from fxprec.passes.crossings.progress import Progress
from fxprec.passes.crossings.reserve import enough_for, reserved
from fxprec.passes.crossings.without_budget import ways_without_budget
from fxprec.passes.notice import SMALLER_BATCH, budget_text, hold_less, readable
from fxprec.plan.lines import place
from fxprec.plan.rows import PeakBytes, PeakPoint

_MOMENTS = 40  # moments in the plan for each point of the curve
_AGAIN = 4  # searches for a budget that an error may name


def within_budget(work: Work, needs: Needs, goal: PeakBudget, progress: Progress) -> tuple[Fit, PeakBytes]:
    """Return the choice for the budget, and its bytes. Raises `BudgetError` if no choice is found."""
    device = work.joint.device
    part, rates = work.peak_part, Rates.of(device)
    high = Chooser(Problem(needs, rates, ())).unlimited
    start = ways_without_budget(work, needs)
    chooser = BestOf.of(needs, rates, work.settings.ways, progress, start)
    everything = high.peak + part.beyond  # a budget that is a share refers to the compiled step's peak, if known
    budget = goal.bytes_of(everything) if part.budget is None else part.budget
    offers = part.shares or part.wants_curve  # other graphs of the step may need this graph's curve
    fits = chooser.curve(waiting=offers) if offers or work.looks_at_budgets else ()
    if part.is_provisional and goal.is_share:
        budget = max(budget, fits[-1].peak)  # later it will be a share of all graphs' peak together
    free = reserved(device, budget) if goal.has_libraries and not goal.is_share else 0
    bound = part.bound(budget, free)
    fit = fits[-1] if part.is_provisional else chooser.unchanged(bound) or chooser.within(bound)
    if fit is None or fit.excess(bound) > 0:
        found = (chooser.least(), *fits)  # the curve's fits may meet a bound on what waits, which `within` missed
        fit = min(found, key=lambda fit: (max(fit.excess(bound), 0), fit.seconds))
        if fit.excess(bound) > 0:
            if not part.shares:
                fit = _reached(fit, chooser)
            whole = everything if part.budget is None else 0
            least = budget - free + math.ceil(fit.excess(bound))
            raise _out_of_reach(budget, least, free, work, fit, whole)
    unsited = {node: form for node, form in fit.replay.kept.items() if node not in needs.rows}
    seconds = rates.step(needs.step)
    peak = PeakBytes(
        budget=budget,
        high=everything,
        planned=fit.peak + part.beyond,
        live=fit.replay.live_by_kind(),
        kept=tuple(node.name for node, form in unsited.items() if not form.is_on_host),
        offloaded=tuple(node.name for node, form in unsited.items() if form.is_on_host),
        graphs=part.num_graphs,
        beside=part.beside,
        reserved=free,
        waiting=fit.waiting + part.beyond_waiting,
        seconds=seconds + fit.seconds,
        points=tuple(_point(found, seconds) for found in (high, *fits)) if fits else (),
    )
    return fit, peak


def _reached(fit: Fit, chooser: BestOf) -> Fit:
    """Return a choice whose peak a search within that peak reaches, so that it can be given as the budget."""
    for _ in range(_AGAIN):
        bound = Bound(fit.peak)
        found = chooser.within(bound)
        if found is None or found.excess(bound) > 0:
            found = chooser.least()
        if found.excess(bound) <= 0:
            break
        fit = found
    return fit


def _point(fit: Fit, seconds: float) -> PeakPoint:
    live = fit.replay.live_by_kind(_MOMENTS)
    return PeakPoint(peak=fit.peak, waiting=fit.waiting, seconds=seconds + fit.seconds, live=live)


def _out_of_reach(budget: int, least: int, free: int, work: Work, fit: Fit, whole: int) -> BudgetError:
    """Return the error. ``whole``: bytes of the peak with everything saved, 0 if other graphs have a part in it."""
    held = _Held(fit, work)
    enough = enough_for(least - budget + free, budget) if free else least
    goal, way = work.settings.peak_budget, hold_less(sum(held.gradients.values()), fit.peak)
    ways = [] if way == SMALLER_BATCH and goal is not None and goal.is_share else [way]  # of a batch of any size
    if "recompute" not in work.settings.ways:
        ways.append("add 'recompute' to ways")
    if "narrow" not in work.settings.ways:
        ways.append("add 'narrow' to ways")
    elif not work.settings.recipe.has_low:
        ways.append(f"choose a recipe with a low format ({work.settings.recipe.name!r} has none)")
    asked = readable(budget) + (f", {readable(free)} of it left free for libraries" if free else "")
    if whole:
        asked += f", {100 * budget / whole:.0f} % of the {_short(whole)} that the step holds with everything saved"
    found = f"the lowest peak found is {readable(least)}, which includes {held.said()}"
    if work.peak_part.is_provisional:
        found = f"{found}, in this graph; other graphs of the step share the budget"
        return BudgetError.of_peak(asked, found, enough, f"above {readable(enough)}", ways)
    high = 0 if free else whole
    return BudgetError.of_peak(asked, found, enough, f"to {budget_text(enough, high)}", ways, high=high)


class _Held:
    """What lives at the peak of a choice: parameter gradients by parameter, and all else by item of the replay."""

    def __init__(self, fit: Fit, work: Work) -> None:
        self.work, self.replay = work, fit.replay
        timeline = fit.replay.timeline
        peak = max(range(len(timeline.live)), key=timeline.live.__getitem__)
        self.running = timeline.order[peak]
        self.others = [i for i, born in timeline.born.items() if born <= peak <= timeline.dies[i]]
        results = work.joint.gradients.items()
        whose = {node: parameter for parameter, (_, gradient) in results for node in _seen_through(gradient)}
        self.gradients: dict[Node, int] = {}
        for item in tuple(self.others):
            parameter = whose.get(fit.replay.made[item])
            if parameter is not None and work.joint.describe(parameter).kind == "param":
                self.others.remove(item)
                self.gradients[parameter] = self.gradients.get(parameter, 0) + fit.replay.items[item].bytes

    def said(self) -> str:
        """Return the parameter gradients and the largest other tensors, in the user's names, with their bytes."""
        said = []
        if self.gradients:
            largest = max(self.gradients, key=self.gradients.__getitem__)
            name, size = self.work.joint.describe(largest).name, _short(self.gradients[largest])
            said.append(f"{_short(sum(self.gradients.values()))} parameter gradients (the largest {size} of {name})")
        workspace = self.replay.items[self.running].workspace
        sizes = [(workspace, f"workspace {self._whose(self.running)}")] if workspace else []
        sizes += [(self.replay.items[i].bytes, self._whose(i)) for i in self.others]
        said += [f"{_short(size)} {whose}" for size, whose in sorted(sizes, key=lambda x: -x[0])[:3]]
        return ", ".join(said)

    def _whose(self, item: int) -> str:
        return _whose(self.replay.made[item], self.work)


def _short(size: int) -> str:
    return readable(size).partition(" (")[0]


def _whose(node: Node, work: Work) -> str:
    """Return a node's origin in the user's names: ``of layers.0, model.py:7 (node addmm)``."""
    made = node
    while (op := _operator(made, work)) is None and made.op != "placeholder" and made.all_input_nodes:
        made = made.all_input_nodes[0]
    if made.op == "placeholder" and made not in work.joint.tangents:
        return f"of {work.joint.describe(made).name} (node {node.name})"
    if op is None:
        return f"node {node.name}"
    half = "in backward of" if work.joint.in_backward(node) else "of"
    return f"{half} {place(op.module, op.source) or op.aten} (node {node.name})"


def _seen_through(node: Node) -> list[Node]:
    """Return a node, and the nodes that it is a view or conversion of."""
    found = [node]
    while found[-1].all_input_nodes and is_view_or_cast(found[-1]):
        found.append(found[-1].all_input_nodes[0])
    return found


def _operator(node: Node, work: Work) -> Operator | None:
    return work.operators.of_node.get(node) or work.operators.of_backward_node.get(node)
