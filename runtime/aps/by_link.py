"""Choose bits by link: measure the link and the gradients of a few steps, plan each layer's bits, follow the link.

Steps come in periods of `PERIOD`. After the first step, in which DDP builds its buckets, `MEASURED` steps record when
gradients are ready. The last of them also takes their statistics. The step after that measures the link. It makes a
plan if there is none yet, if the link has changed, or if gradients have changed so that the plan in force rounds too
much. Then this plan and plans of one width for all layers are tried in turn, a step each. The fastest stays, because no
model knows what threads and processes that share cores cost. Every input of these decisions is reduced over ranks.
Every rank plans by itself, and ranks compare their plans.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxprec.errors import ConfigError, FxprecError, PlanError, did_you_mean
from fxprec.runtime.aps.exchange import ring_steps
from fxprec.runtime.aps.gathers import Gathers, Way
from fxprec.runtime.aps.groups import Groups, agree, communication_device
from fxprec.runtime.aps.link_plan import LayerBits, LinkPlan
from fxprec.runtime.aps.link_planner import CLOSE, alike, choose
from fxprec.runtime.aps.link_probe import largest_of_ranks, probe_links, probe_low_rank, probe_widths
from fxprec.runtime.aps.link_problem import ALL_REDUCE, REDUCE_SCATTER, Problem, Width
from fxprec.runtime.aps.link_statistics import Statistics
from fxprec.runtime.aps.link_trial import CLOSEST, TRIALS, Clock, Trial
from fxprec.runtime.aps.link_widths import by_nodes, widths_of
from fxprec.runtime.aps.lost import RollCall
from fxprec.runtime.aps.low_rank import Memory
from fxprec.runtime.aps.options import APSOptions
from fxprec.runtime.aps.shards import Shards
from fxprec.runtime.aps.wire import INSIDE, Coding, Sending
from fxprec.runtime.events import Event

PERIOD, MEASURED = 100, 3
UNPLANNED = 16
"""Bits of a layer that no plan names."""
TRIED = 2.0
"""A plan is tried if it is predicted to take at most this many times as long as the chosen plan."""


class ByLink:
    """The plan of a state with ``bits="by link"``, and the measurements that it is made from.

    `names` has the names of all parameters, `weights` the weights of their errors by name or pattern. If `options` give
    the links, no link is measured.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        codings: Mapping[int, Coding],
        groups: Groups,
        options: APSOptions,
        memory: Memory,
        weights: Mapping[str, float] | None,
        plan: LinkPlan | None,
    ) -> None:
        self._codings = codings
        self._groups = groups
        self._options = options
        self._transport = ALL_REDUCE
        self._gathers: Gathers | None = None
        self._has_met = False
        self._timed: tuple[Width, ...] = ()
        self._memory = memory
        self._links = options.given_links(groups.node is not None)
        self._names = WeakTensorKeyDictionary()
        for parameter, name in names.items():
            self._names[parameter] = name
        self._statistics = Statistics(groups, options.low_rank, memory, _by_name(weights or {}, list(names.values())))
        self._steps = -1
        """Number of this process's step within the current period."""
        self._clocks: list[list[Clock]] = []
        """For each measured step, the moments when the gradients of each bucket were ready."""
        self._trial: Trial | None = None
        self._roll_call = RollCall(groups.exponents)
        self.events: list[Event] = []
        self.plan: LinkPlan | None = None
        self._rows: dict[str, LayerBits] = {}
        if plan is not None:
            self.adopt(plan)

    def lost(self, error: BaseException) -> BaseException:
        """Return an error that names the lost rank for torch.distributed's RuntimeError, any other error unchanged."""
        is_own = isinstance(error, FxprecError | torch.OutOfMemoryError)  # RuntimeErrors that this rank alone has
        return self._roll_call.lost(error) if isinstance(error, RuntimeError) and not is_own else error

    @property
    def is_trying(self) -> bool:
        """Return whether plans are being tried in turn."""
        return self._trial is not None

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's name. Raises `ConfigError` for a parameter that the state's model does not have."""
        name: str | None = self._names.get(parameter)
        if name is None:
            raise ConfigError(
                f"bits='by link' does not know a parameter of shape {tuple(parameter.shape)}; pass model= the model "
                "that DistributedDataParallel wraps, or that fully_shard has sharded"
            )
        return name

    def parameter_of(self, name: str) -> Tensor:
        """Return the parameter with a name. Raises `PlanError` if the model has none."""
        found: Tensor | None = next((p for p, own in self._names.items() if own == name), None)
        if found is None:
            raise PlanError(
                f"saved state has a layer {name!r:.60} that this model does not have; load a state of this model"
            )
        return found

    def sharded(self, modules: Sequence[Shards], *, gathers: bool, exact_every: int | None = None) -> None:
        """Plan for FSDP2 from now on: its reduce-scatter and, with `gathers`, its all-gather of parameters.

        `exact_every` as in `use_aps`.

        Raises `ConfigError` for low rank, which FSDP2 cannot use, and `PlanError` if a plan in force gathers modules
        that the model does not have.
        """
        if self._options.low_rank:
            raise ConfigError(
                f"APS low_rank={self._options.low_rank} works only with DistributedDataParallel's hook: under FSDP2 no "
                "rank has a whole matrix; leave it out"
            )
        self._transport = REDUCE_SCATTER
        self._gathers = Gathers(modules, self._groups.size, exact_every) if gathers else None
        if self.plan is not None:
            self.adopt(self.plan)

    def gathered_as(self, index: int, dtype: torch.dtype) -> Way | None:
        """Return how the module of that number gathers parameters that it computes with in `dtype`."""
        return None if self._gathers is None else self._gathers.way(self.plan, index, dtype)

    def resume(self, plan: Mapping[str, Any] | None) -> None:
        """Continue with a saved plan, or measure anew if none was made yet."""
        self._steps, self._trial, self.plan, self._has_met = -1, None, None, False
        self._rows = {}
        if plan is not None:
            self.adopt(LinkPlan.from_dict(plan))

    def sending_of(self, parameter: Tensor) -> Sending:
        """Return how the plan sends a layer."""
        row = self._rows.get(self.name_of(parameter))
        if row is None:
            return Sending(self._codings[UNPLANNED])
        return Sending(self._codings[row.bits], row.by_nodes, row.low_rank)

    def adopt(self, plan: LinkPlan) -> None:
        """Send by this plan from now on. Raises `PlanError` if the plan is not for this model and these ranks."""
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        for layer in plan.layers:
            if sizes.get(layer.name) != layer.elements:
                hint = "" if layer.name in sizes else did_you_mean(layer.name, sizes)
                raise PlanError(
                    f"link plan has a layer {layer.name!r:.60} of {layer.elements} elements, this model has none"
                    f"{hint}; plan again by leaving plan= out"
                )
            if layer.bits not in self._codings:
                raise PlanError(f"link plan sends {layer.name!r} in {layer.bits} bits; give widths= that has them")
            if layer.low_rank not in (0, self._options.low_rank):
                raise PlanError(
                    f"link plan sends {layer.name!r} in rank {layer.low_rank}; give low_rank={layer.low_rank}, or plan "
                    "again by leaving plan= out"
                )
        if plan.ranks != self._groups.size:
            raise PlanError(f"link plan is for {plan.ranks} ranks, and {self._groups.size} are running; plan again")
        if self._gathers is not None:
            self._gathers.check(plan)
        elif plan.gathered and self._transport is REDUCE_SCATTER:
            raise PlanError(
                "link plan gathers parameters in few bits; pass parameters='by link' to use_aps, or plan again"
            )
        if plan.node != (node := 1 if self._groups.node is None else self._groups.node.size):
            raise PlanError(
                f"link plan is for nodes of {plan.node} ranks, and here nodes have {node}; give "
                f"group_size={plan.node}, or plan again by leaving plan= out"
            )
        self.plan = plan
        self._rows = {row.name: row for row in plan.layers}

    def bucket_ready(
        self,
        step: int,
        begins: bool,
        parameters: Sequence[Tensor],
        views: Sequence[Tensor],
        at: Clock | None = None,
    ) -> None:
        """Note that a bucket's gradients are complete, before it is sent; at a step's first bucket, plan if due.

        `begins` marks the first bucket; `at` is the moment when the bucket was complete, now if left out. Raises
        `ConfigError` on all ranks if they would not send alike.
        """
        device = views[0].device if views else torch.device("cpu")
        if begins:
            self._begin(step, device)
        if 1 <= self._steps <= MEASURED:
            self._clocks[-1].append(at or Clock(device))
        if self._steps == MEASURED:
            known = [row for row in zip(parameters, views, strict=True) if row[0] in self._names and row[1].numel()]
            self._statistics.note(len(self._clocks[-1]) - 1, {self.name_of(p): (p, v) for p, v in known}, self._rows)

    def _begin(self, step: int, device: torch.device) -> None:
        self.meet(step)
        if self._trial is not None:
            self._try(step, self._trial, device)
            return
        self._steps = (self._steps + 1) % PERIOD
        if self._steps == MEASURED + 1:
            self._look(step, device)
            self._clocks = []
            self._statistics.clear()
        elif 1 <= self._steps <= MEASURED:
            self._clocks.append([])

    def meet(self, step: int) -> None:
        """Compare step and plan with the other ranks before a process's first exchange. Raises `ConfigError`."""
        if not self._has_met:
            self._has_met = True
            self._agree(f"step {step}, " + ("no link plan" if self.plan is None else f"link plan {self.plan.digest}"))

    def _agree(self, text: str) -> None:
        way_out = "load the state of the same step on all; a rank cannot join later"
        agree(text, self._groups.exponents, "ranks would not send alike", way_out)

    def _look(self, step: int, device: torch.device) -> None:
        """Measure the link, and plan if that is due."""
        layers = self._statistics.layers() if len({len(row) for row in self._clocks}) == 1 else None
        if layers is None:
            self._steps = 0  # a gradient is not finite, or a module had none: measure again in the next steps
            return
        last = None if self.plan is None else self.plan.links
        links = self._links or probe_links(self._groups, last)
        ready, on_cpu, budget = self._ready(), device.type == "cpu", self._options.error_budget
        if on_cpu and not self._transport.overlaps:
            ready = (0.0,) * len(ready)
        problem = Problem(
            layers,
            ready,
            self._widths(),
            links,
            self._groups.size,
            budget,
            float(on_cpu),
            self._transport,
            self._options.error_feedback,
        )
        if last is None or links.differ(last) or self._error(problem) > budget:
            gathers, group = self._gathers, self._groups.payload
            gathered, sent = ((), 0) if gathers is None else gathers.chosen(links, group)
            plan, *others = [
                replace(p, gathered=gathered, bytes_gathered=sent) for p in (choose(problem), *alike(problem))
            ]
            self._agree(f"link plan {plan.digest} at step {step}")
            others = [p for p in others if p.ways != plan.ways and p.end <= TRIED * plan.end]
            if others and self._links is None and TRIALS:
                self._trial = Trial([plan, *others], self.plan)
                self._try(step, self._trial, device)
            else:
                self._follow(step, plan, self.plan)

    def _widths(self) -> tuple[Width, ...]:
        """Return the widths to choose from, each also by nodes if there are nodes. Costs are measured once."""
        if not self._timed:
            stochastic = self._options.rounding == "stochastic"
            steps, passes = ring_steps(self._groups.payload), self._transport.passes
            widths = widths_of(self._codings, stochastic=stochastic, passes=passes, ring_steps=steps)
            timed = probe_widths(widths, communication_device(self._groups.payload), self._groups.payload)
            if (node := self._groups.node) is not None:
                cast = next(width for width in timed if width.bits == 8 * INSIDE.itemsize)
                steps = ring_steps(node.between.payload)
                timed += tuple(by_nodes(width, cast, node.size, node.between.size, steps, passes) for width in timed)
            if self._options.low_rank:
                cast = next(width for width in timed if width.bits == UNPLANNED)
                timed += (probe_low_rank(cast, self._options.low_rank, self._memory, self._groups.payload),)
            self._timed = timed
        return self._timed

    def _try(self, step: int, trial: Trial, device: torch.device) -> None:
        """Begin the next step of a trial, or end it: of the plans with the fastest steps, the most exact stays."""
        if (plan := trial.next(Clock(device))) is not None:
            self.adopt(plan)
            return
        self._trial = None
        seconds = largest_of_ranks(trial.seconds(), self._groups.exponents)
        closest = [p for p, s in zip(trial.plans, seconds, strict=True) if s <= min(seconds) * CLOSEST]
        if len(closest) > 1 and not trial.is_last:
            self._trial = Trial(closest, trial.old, is_last=True)
            self._try(step, self._trial, device)
            return
        close = [p for p, s in zip(trial.plans, seconds, strict=True) if s <= min(seconds) * CLOSE]
        self._follow(step, min(close, key=lambda p: p.error), trial.old)

    def _follow(self, step: int, plan: LinkPlan, old: LinkPlan | None) -> None:
        self.adopt(plan)
        in_low_rank = {row.name for row in plan.layers if row.low_rank}
        self._memory.keep_factors(p for p, name in self._names.items() if name in in_low_rank)
        if old is None:
            return
        before, now = _ways_of(old), _ways_of(plan)
        for site, way in now.items():
            if (earlier := before.get(site, f"{UNPLANNED} bits")) != way:
                said = f"{earlier} to {way}, link {old.links} to {plan.links}"
                self.events.append(Event(step, "relinked", site, said))

    def _ready(self) -> tuple[float, ...]:
        """Return the seconds from the first bucket to each bucket: the least of the steps, the largest of the ranks."""
        rows = [[clock.after(row[0]) for clock in row] for row in self._clocks]
        return tuple(largest_of_ranks([min(times) for times in zip(*rows, strict=True)], self._groups.exponents))

    def _error(self, problem: Problem) -> float:
        """Return the error that the plan in force would add to the present gradients, to compare with the budget."""
        widths = {(width.bits, width.by_nodes, width.low_rank): width for width in problem.widths}
        rows = {name: (row.bits, row.by_nodes, row.low_rank) for name, row in self._rows.items()}
        return sum(problem.error(r, widths[rows.get(r.name, (UNPLANNED, False, 0))]) for r in problem.layers)


def _ways_of(plan: LinkPlan) -> dict[str, str]:
    """Return as words how a plan sends each layer and gathers the parameters of each FSDP2 module."""
    return plan.ways | {f"parameters of {row.name}": f"{row.bits} bits" for row in plan.gathered}


def _by_name(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the weight of each parameter that a name or pattern matches. Raises `ConfigError` if one matches none."""
    found: dict[str, float] = {}
    for pattern, weight in weights.items():
        named = [n for n in names if fnmatch.fnmatch(n, pattern) or fnmatch.fnmatch(n, f"{pattern}.*")]
        if not named or not weight > 0:
            cause = "names no parameter" if not named else f"is {weight}"
            raise ConfigError(f"weights[{pattern!r}] {cause}; give a name or pattern of parameters a positive number")
        found |= dict.fromkeys(named, weight)
    return found
