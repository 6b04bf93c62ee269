"""One simulated network trained under many precision assignments, compiled once.

In storage ``simulate`` a tensor's format is a row of a table, so that every assignment runs the same code. It runs op by
op, its casts in the C++ kernels: a step takes as long as Inductor's code (36 ms of SqueezeNet at width 0.1), which takes
a hundred times as long to compile.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec import compat
from fxprec.driver.interpreter import interpreted
from fxprec.plan import Plan
from fxprec.plan.edits import as_edited

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Tensor], Tensor]
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@contextmanager
def op_by_op() -> Iterator[None]:
    """What compiles meanwhile is lowered to kernels of ours as ever, and run without Inductor."""
    with mock.patch.object(compat, "compile_fx_inner", _interpreted):
        yield


def _interpreted(gm: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
    for node in gm.graph.nodes:  # the lowering chose channels last, which Inductor's views follow
        if node.target in _VIEWS:
            node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return interpreted(gm)


def compiled_beside(model: nn.Module, backend: fxprec.Backend) -> nn.Module:
    """The model compiled, those before it kept: a reset has them compiled again, into graphs that no table holds."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1000  # one ``forward`` serves many networks
    return torch.compile(model, backend=backend)


@dataclass
class Run:
    """What one training gave."""

    losses: list[float]
    """Of the training batches, by step."""
    held_out_loss: float
    """NaN where it is no finite number or worse than chance: diverged."""
    accuracy: float
    """Held out, percent."""
    low_ratio: float = 0.0
    """Elements held low / all, averaged over the steps."""
    promoted: float = 0.0
    """Elements promoted / all, at the end."""
    overflow: list[float] = field(default_factory=list)
    """Largest overflow ratio of a forward tensor, by step."""


class Network:
    """A classifier with fixed shapes, trained from given weights in float32 or under a plan."""

    def __init__(self, make: Callable[[], nn.Module], batch: Batch, **options: Any) -> None:
        self.make, self.model = make, make()
        self.backend = fxprec.Backend(fxprec.Config(**{"recipe": "hfp8", "storage": "simulate", **options}))
        self.compiled = compiled_beside(self.model, self.backend)
        with op_by_op():
            self.loss(self.compiled(batch[0]), batch[1]).backward()
        self._start = self.backend.controllers[0].state_dict() | {"step": 0}
        self._rules = self.backend.controllers[0].rules

    @staticmethod
    def loss(output: Any, target: Tensor) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(output, target)

    @property
    def all_low(self) -> Plan:
        """The plan that was compiled, without what was promoted since."""
        return Plan.from_dict(self._start["plan"])

    def train(
        self,
        plan: Plan | None,
        seed: int,
        batches: Sequence[Batch],
        held_out: Sequence[Batch],
        *,
        promotes: bool = True,
        lr: float = 0.05,
    ) -> Run:
        """Train with SGD and momentum, one step a batch, the rate falling along a cosine; None is float32."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self.make().state_dict())
        call = self.model if plan is None else self.compiled
        if plan is not None:
            self._begin(plan, promotes)
        optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
        run = Run([], math.nan, 0.0)
        for x, y in batches:
            optimizer.zero_grad()
            loss = self.loss(call(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.losses.append(loss.item())
            if plan is not None:
                run.overflow.append(self._largest_overflow())
        if plan is not None:
            assert len(self.backend.controllers) == 1, "compiled again: the plan was another graph's"
            run.low_ratio, run.promoted = self.backend.mean_demoted_ratio, self.backend.plans[0].promoted_ratio
        run.held_out_loss, run.accuracy = self._judge(call, held_out)
        return run

    def _begin(self, plan: Plan, promotes: bool) -> None:
        controller = self.backend.controllers[0]
        controller.load_state_dict(self._start | {"plan": plan.to_dict()})
        controller.latest.clear()
        controller.events.clear()
        controller.rules = self._rules if promotes else replace(self._rules, promote_above=None)

    def _largest_overflow(self) -> float:
        controller = self.backend.controllers[0]
        controller.act_on_all()
        forward = (s for s in controller.latest.values() if controller.site_of(s.site).direction == "forward")
        return max((s.overflow_ratio for s in forward), default=0.0)

    def _judge(self, call: Callable[..., Any], held_out: Sequence[Batch]) -> tuple[float, float]:
        """Loss and accuracy in the precision of training, with the batch's own statistics in norms."""
        losses, right, count = [], 0, 0
        for x, y in held_out:
            output = call(x).detach()
            losses.append(float(self.loss(output, y)))
            right += int((output.argmax(1) == y).sum())
            count += y.numel()
        mean = sum(losses) / len(losses)
        chance = math.log(output.shape[1])
        return mean if mean < chance else math.nan, 100 * right / count


def demoted(plan: Plan, ratio: float, order: str = "size", seed: int = 0) -> Plan:
    """The plan with groups low until ``ratio`` of all elements is: largest first, smallest first, or at random."""
    groups = sorted(plan.groups, key=lambda g: (-g.elements, g.id))
    if order == "ascending":
        groups.reverse()
    elif order == "random":
        random.Random(seed).shuffle(groups)
    low, reached = set(), 0
    for group in groups:
        if reached >= ratio * plan.total_elements:
            break
        low.add(group.id)
        reached += group.elements
    return _with_low(plan, low)


def _with_low(plan: Plan, low: Collection[int]) -> Plan:
    return as_edited(replace(plan, groups=tuple(replace(g, low=g.id in low) for g in plan.groups)))


def exact(make: Callable[[], nn.Module], batch: Batch, plan: Plan, ratio: float) -> Plan:
    """The plan with the groups low that do the least damage, by a calibration step on the batch, at that ratio."""
    found = _planned(make, batch, plan, policy="exact", low_ratio=ratio)
    return _with_low(plan, {group.id for group in found.groups if group.low})


def by_policy(make: Callable[[], nn.Module], batch: Batch, policy: str, plan: Plan) -> Plan:
    """``plan`` with the formats and the ratio that another policy gives."""
    found = _planned(make, batch, plan, policy=policy)
    sites = tuple(replace(site, format=other.format) for site, other in zip(plan.sites, found.sites, strict=True))
    return replace(plan, sites=sites, achieved_low_ratio=found.achieved_low_ratio, policy=policy)


def _planned(make: Callable[[], nn.Module], batch: Batch, plan: Plan, **options: Any) -> Plan:
    torch.manual_seed(0)
    backend = fxprec.Backend(fxprec.Config(recipe=plan.recipe, storage="simulate", **options))
    compiled = compiled_beside(make(), backend)
    with op_by_op():
        for _ in range(2 if options["policy"] == "exact" else 1):  # the first one measures
            Network.loss(compiled(batch[0]), batch[1]).backward()
    found = backend.plans[0]
    assert plan.first_difference(found) is None
    return found
