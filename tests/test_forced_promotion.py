"""A promotion in the middle of training, wherever training may be: it goes on, and computes what a fresh compile would.

The default run holds every case and every storage with the eager lowering, and the one with most parts through Inductor;
``pytest -m full`` runs all pairs of both, and all of them through Inductor.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import STORAGES, narrow_recipe
from helpers import as_counts, one_rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.driver import joint_compilation, plan_changes
from fxprec.plan import Site
from fxprec.runtime.controller import Controller

CASES = ("float32", "autocast", "bf16", "dynamic", "checkpoint", "graph break", "ddp")
WITH_INDUCTOR = (("dynamic", "packed"),)
EAGER = (
    *((case, "packed") for case in CASES),
    *(
        ("bf16", "native"),
        ("autocast", "native"),
        ("dynamic", "native"),
        ("float32", "simulate"),
        ("dynamic", "simulate"),
    ),
)


def pairs(gate: tuple[tuple[str, str], ...]) -> pytest.MarkDecorator:
    """Parametrize by every pair of a case and a storage; those outside of ``gate`` are marked ``full``."""
    every = [(case, storage) for case in CASES for storage in STORAGES]
    return pytest.mark.parametrize(
        ("case", "storage"), [pytest.param(*pair, marks=() if pair in gate else pytest.mark.full) for pair in every]
    )


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*DDP optimizer is off"),
]


class Net(nn.Module):
    """(batch, length, 8) to (batch, length, 4): a residual block and a ReLU between linear layers.

    Four tensors are stored low: the input, GELU's argument, the residual sum and ReLU's result.
    """

    def __init__(self, case: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.gate = nn.Linear(16, 16)
        self.case, self.gain = case, 1.25  # under dynamic shapes a Python float is an input with a symbol of its own

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x)) * self.gain
        if self.case == "graph break":
            torch._dynamo.graph_break()
        x = checkpoint(self.block, x, use_reentrant=False) if self.case == "checkpoint" else self.block(x)
        return self.last(F.relu(self.gate(x * x.sigmoid())))

    def block(self, x: Tensor) -> Tensor:
        return x + self.middle(x.flatten(0, 1)).view_as(x)


class Run:
    """One model being trained in one of the cases."""

    def __init__(self, case: str, storage: str, lowering: str, state: Any = None, strict: bool = False) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.case = case
        self.model = Net(case).to(torch.bfloat16 if case == "bf16" else torch.float32)
        recipe = narrow_recipe(storage)
        self.backend = fxprec.Backend(
            fxprec.Config(recipe=recipe, storage=storage, low_ratio=1.0, lowering=lowering, strict=strict)
        )
        if state is not None:
            self.backend.load_state_dict(state)
        model = DistributedDataParallel(self.model) if case == "ddp" else self.model
        self.compiled = torch.compile(model, backend=self.backend, dynamic=case == "dynamic")

    def step(self, number: int) -> list[Tensor]:
        """Return the loss and every gradient of one step; under dynamic shapes the length is ``number``."""
        length = number if self.case == "dynamic" else 4
        x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(number))
        self.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case == "autocast"):
            loss = self.compiled(x.to(next(self.model.parameters()).dtype)).float().square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in self.model.parameters())]

    @property
    def traces(self) -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def overflow(controller: Controller) -> list[Site]:
    """Let statistics arrive that promote two tensors held low, an output and a parameter if there is one."""
    low = [s for s in controller.plan.sites if s.direction == "forward" and s.format != controller.rules.hi]
    outputs, params = ([s for s in low if s.kind == kind and s.tensor != "x"] for kind in ("output", "param"))
    chosen = [*outputs[:1], *(params or outputs[1:])[:1]]
    row = torch.tensor(as_counts(1.0, 0.0, 1.0), dtype=torch.float64)
    if controller.copies is not None:  # else the scales of these copies would be lowered first
        controller.copies.at = lambda row, step: 0
        controller.copies.note = lambda *args, **options: []
    controller.queue.push([s.id for s in chosen], row.repeat(len(chosen)))
    return chosen


def check(case: str, storage: str, lowering: str) -> None:
    with one_rank() if case == "ddp" else contextlib.nullcontext():
        run = Run(case, storage, lowering)
        run.step(3)
        traces, controllers = run.traces, run.backend.controllers
        chosen = [overflow(controller) for controller in controllers]
        run.step(5)
        assert run.traces == traces, "Dynamo traced again"
        for controller, sites in zip(controllers, chosen, strict=True):
            assert [s.id for s in controller.plan.promoted] == sorted(s.id for s in sites) != []
            assert {s.format for s in controller.plan.promoted} == {controller.rules.hi}
        told = Counter(event.kind for event in run.backend.events)
        assert told["promotion"] == sum(map(len, chosen))
        assert told["relowering"] == (0 if storage == "simulate" else len(controllers))
        assert not [e for e in run.backend.events if "promoting it" in e.detail]
        state = run.backend.state_dict()
        going_on = [value.clone() for value in run.step(3)]
        fresh = Run(case, storage, lowering, state)
        for i, (found, wanted) in enumerate(zip(going_on, fresh.step(3), strict=True)):
            assert torch.equal(found, wanted), f"{i}: loss, then gradients"
        assert [s.format for p in fresh.backend.plans for s in p.sites] == [
            s.format for p in run.backend.plans for s in p.sites
        ]


@pairs(EAGER)
def test_training_goes_on_as_if_compiled_afresh(case: str, storage: str) -> None:
    check(case, storage, "eager")


def fail_in_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        torch._C._set_grad_enabled(False)  # a compilation that is cut short leaves such things behind
        raise AssertionError("no such node\nand a second line")

    monkeypatch.setattr(joint_compilation, "run_passes", fail)


def fail_in_the_backward_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, is_backward: bool = False, **options: Any) -> Any:
        if is_backward:
            raise AssertionError("no such node\nand a second line")
        return compile_half(*args, **options)

    compile_half = joint_compilation.JointCompilation.compile_half
    monkeypatch.setattr(joint_compilation.JointCompilation, "compile_half", fail)


@pytest.mark.parametrize("break_it", [fail_in_the_passes, fail_in_the_backward_half])
def test_a_promotion_that_does_not_compile_is_told_and_training_goes_on(break_it: Any, monkeypatch: Any) -> None:
    run = Run("bf16", "native", "eager")
    run.step(3)
    run.step(3)  # with scales settled
    before, plan = [value.clone() for value in run.step(3)], run.backend.plans[0]
    (controller,) = run.backend.controllers
    break_it(monkeypatch)
    chosen = overflow(controller)
    first = min(chosen, key=lambda site: site.id)
    words = rf"{first.tensor} \(.*\): promoting it and 1 more to bf16 failed \(AssertionError: no such node\): "
    hint = rf"training continues with it in e4m3fn; .*keep_high=\('{first.module}',\)"
    with pytest.warns(fxprec.FxprecWarning, match=words + hint):
        after = run.step(3)
    assert torch.is_grad_enabled()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "the code that ran before"
    (told,) = (e for e in run.backend.events if "promoting it" in e.detail)
    assert (told.kind, told.step) == ("fallback", controller.step)
    assert run.backend.plans[0].sites == plan.sites
    again = overflow(controller)
    assert again == chosen
    run.step(3)  # the same tensors are not tried again: no warning
    for _ in range(plan_changes.MAX_GIVEN_UP - 1):
        site = next(s for s in plan.sites if s.format == "e4m3fn" and s.id not in controller._refused)
        controller.plan = controller.plan.promote([site.id], step=controller.step)
        with pytest.warns(fxprec.FxprecWarning, match="promoting it to bf16 failed") as warned:
            run.step(3)
    assert str(warned[-1].message).endswith("this was attempt 3, the last for this graph")
    assert controller.rules.promote_above is None


def test_under_strict_such_a_promotion_is_an_error_and_the_step_can_be_taken_all_the_same(monkeypatch: Any) -> None:
    run = Run("float32", "packed", "eager", strict=True)
    run.step(3)
    fail_in_the_passes(monkeypatch)
    overflow(run.backend.controllers[0])
    with pytest.raises(fxprec.FallbackError, match="promoting it and 1 more to 1-6-9 failed"):
        run.step(3)
    assert all(value.isfinite().all() for value in run.step(3))


def test_a_state_is_loaded_in_another_mode_than_the_graph_was_traced_in() -> None:
    run = Run("autocast", "native", "eager")
    run.step(3)
    overflow(run.backend.controllers[0])
    run.step(3)
    state, wanted = run.backend.state_dict(), [value.clone() for value in run.step(3)]
    resumed = Run("autocast", "native", "eager")
    resumed.step(3)
    with torch.no_grad():
        resumed.backend.load_state_dict(state)  # outside of autocast, and without gradients: compiled again here
    assert all(torch.equal(a, b) for a, b in zip(resumed.step(3), wanted, strict=True))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.inductor
@pairs(WITH_INDUCTOR)
def test_training_goes_on_with_inductor(case: str, storage: str) -> None:
    check(case, storage, "auto")
