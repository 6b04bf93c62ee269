"""One ``peak_budget`` for all graphs of a step: what each may hold, and what the allocator sees of them together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import eager_backend
from processors import AT_HAND
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fxprec
from benchmarks.memory.measure import peak_bytes
from benchmarks.memory.pairs import loops_left_out
from benchmarks.options.networks import Tripled
from fxprec.passes.crossings.best_of import BestOf
from fxprec.passes.crossings.shared_budget import Order, SharedBudget
from fxprec.plan import PeakPoint
from fxprec.report.dump_folder import DumpFolder
from fxprec.report.target import plan_under_fakes


class Blocks(nn.Module):
    """Six residual blocks, a graph break after some of them, and a loss."""

    def __init__(self, breaks: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x, 0, 2)
        if 2 in self.breaks:
            torch._dynamo.graph_break()
        x = self.run(x, 2, 4)
        if 4 in self.breaks:
            torch._dynamo.graph_break()
        return self.run(x, 4, 6).square().mean()

    def run(self, x: Tensor, first: int, end: int) -> Tensor:
        for block in self.blocks[first:end]:
            x = x + block(x)
        return x


def blocks(*breaks: int) -> Blocks:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Blocks(breaks)


X = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, run: Any) -> Tensor:
    model.zero_grad()
    run(X).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def most_held(chosen: Any, order: Order, gradients: Any) -> int:
    """Walk through a step, call by call."""
    live = most = 0
    for graph in order.calls:
        most = max(most, live + chosen[graph].peak)
        live += chosen[graph].waiting
    there: set[int] = set()
    for graph in (order.calls[at] for at, is_backward in order.halves if is_backward):
        live -= chosen[graph].waiting
        most = max(most, live + chosen[graph].peak + sum(gradients[g] for g in there))
        there.add(graph)
    return most


@pytest.mark.parametrize("seed", range(12))
def test_of_all_choices_within_the_budget_the_fastest_is_taken(seed: int) -> None:
    draw = random.Random(seed)
    calls = [(0, 1, 2), (0, 2, 2)][: 1 + seed % 2]
    orders = [Order.of(each, draw.sample(range(3), 3) if seed % 3 else (2, 1, 0)) for each in calls]
    points = {
        g: [
            PeakPoint(peak=w + draw.randrange(50), waiting=w, seconds=draw.random())
            for w in (draw.randrange(1, 100) for _ in range(4))
        ]
        for g in range(3)
    }
    grads = {g: draw.randrange(10) for g in range(3)}
    shared = SharedBudget(points, orders, grads)
    every = [dict(enumerate(chosen)) for chosen in itertools.product(*points.values())]
    held = [max(most_held(chosen, each, grads) for each in orders) for chosen in every]
    assert shared.least() == min(held)
    budget = sorted(held)[len(held) // 3]
    fits = [sum(p.seconds for p in chosen.values()) for chosen, most in zip(every, held, strict=True) if most <= budget]
    chosen = shared.within(budget)
    assert chosen is not None
    assert sum(p.seconds for p in chosen.values()) == pytest.approx(min(fits), rel=1e-3)
    assert shared.within(min(held) - 1) is None
    for graph, part in shared.parts(chosen, budget).items():
        assert part.beside + chosen[graph].peak <= budget
        assert part.waiting >= chosen[graph].waiting


@pytest.mark.parametrize("breaks", [(2,), (2, 4)], ids=["one break", "two"])
def test_graphs_share_one_budget_from_the_second_step_on(breaks: tuple[int, ...]) -> None:
    model = blocks(*breaks)
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="60%")
    run = torch.compile(model, backend=backend)
    gradients(model, run)
    assert all("in the first step graphs are planned one by one" in " ".join(p.notes) for p in backend.plans[:-1])
    found = gradients(model, run)
    plans = backend.plans
    assert len(plans) == 1 + len(breaks)
    assert F.cosine_similarity(found, gradients(model, model), dim=0) > 0.999
    held = [plan.peak_bytes for plan in plans]
    assert all(f"peak budget: {len(plans)} graphs of the step share" in " ".join(plan.notes) for plan in plans)
    assert len({peak.budget for peak in held if peak}) == 1, "that of the whole step"
    assert all(peak and peak.beside + peak.planned <= peak.budget for peak in held)
    before = [peak.waiting or 0 for peak in held if peak]
    after = [4 * sum(p.numel() for p in block.parameters()) for block in model.blocks]
    ends = [0, *breaks, 6]
    for i, peak in enumerate(held):
        assert peak is not None
        assert peak.beside >= sum(before[:i]) + sum(after[ends[i + 1] :])
    gradients(model, run)
    assert backend.plans == plans, "the third step has nothing new"


@pytest.mark.cpu_dependent  # oneDNN's workspace is that of the processor which runs it
@pytest.mark.inductor
@pytest.mark.parametrize("breaks", [(2,), (2, 4)], ids=["one break", "two"])
def test_the_allocator_sees_no_more_than_the_budget_in_all_graphs_together(breaks: tuple[int, ...]) -> None:
    model = blocks(*breaks)
    budget = "45%" if torch.bfloat16 in AT_HAND.gemms else "55%"  # GEMMs that are widened take workspace
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", peak_budget=budget))
    run = torch.compile(model, backend=backend)
    with loops_left_out():
        gradients(model, run)
        backend.stop_promoting()  # for what is left of numbers
        gradients(model, run)
        model.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            run(X).backward()
    (most,) = {plan.peak_bytes.budget for plan in backend.plans if plan.peak_bytes}
    assert 0.75 * most < peak_bytes(profiled) <= most


def test_a_budget_that_each_graph_keeps_and_all_do_not_is_out_of_reach() -> None:
    model = blocks(2, 4)
    run = torch.compile(model, backend=eager_backend("native", recipe="fp8", low_ratio=None, peak_budget=1_400_000))
    gradients(model, run)
    words = r"^peak_budget is 1.34 MiB .* for the 3 training graphs of a step together, and the lowest peak found is"
    with pytest.raises(fxprec.BudgetError, match=words):
        gradients(model, run)


class Broken(nn.Module):
    """What follows its break does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        torch._dynamo.graph_break()
        return x


def test_a_graph_that_turns_out_to_be_alone_gets_the_whole_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BestOf, "unchanged", lambda *_: None)  # the choice without a budget holds less
    torch._dynamo.reset()
    model = Broken()
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="100%")
    run = torch.compile(model, backend=backend)
    gradients(model, run)
    first = backend.plans[0].peak_bytes
    gradients(model, run)
    peak = backend.plans[0].peak_bytes
    assert first is not None
    assert peak is not None
    assert (peak.graphs, peak.beside) == (1, 0)
    assert first.planned < peak.planned <= peak.budget == peak.high
    assert peak.seconds < first.seconds


def test_a_dump_says_that_other_graphs_follow(tmp_path: Path) -> None:
    torch._dynamo.reset()
    folder = DumpFolder(tmp_path, plan_only=True)
    config = fxprec.Config(recipe="fp8", peak_budget="100%", lowering="eager", dump=tmp_path)
    plan_under_fakes(lambda: (Blocks((2,)), X), fxprec.Backend(config, dump=folder), "blocks", folder)
    plan = fxprec.Plan.load(tmp_path / "graph-0" / "plan.json")
    assert any("a graph break ends this graph" in note for note in plan.notes)
    peak = plan.peak_bytes
    assert peak is not None
    assert peak.planned <= peak.budget
    assert [p.peak for p in peak.points[1:]] == sorted((p.peak for p in peak.points[1:]), reverse=True)
    assert [p.seconds for p in peak.points[1:]] == sorted(p.seconds for p in peak.points[1:])
    assert all(max(map(sum, p.live)) == p.peak for p in peak.points), "what is drawn is what is said"
    assert 2 <= len(peak.points) <= 8


class Short(nn.Module):
    """Two graphs, the first so small that its peak does not depend on what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.body = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = Tripled.apply(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x + self.body(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo itself does
def test_a_part_that_only_a_point_of_the_curve_meets_is_met() -> None:
    """The bound on what waits was missed, and the error asked for a larger budget that was below the one given."""
    torch.manual_seed(0)
    model = Short()
    backend = eager_backend("native", recipe="bf16", peak_budget="90%", low_ratio=None)
    compiled = torch.compile(model, backend=backend)
    for rows in (16, 16):
        compiled(torch.randn(rows, 32)).square().mean().backward()
    for plan in backend.plans:
        assert plan.peak_bytes is not None
        assert plan.peak_bytes.planned <= plan.peak_bytes.room


def in_flight(model: nn.Module, run: Any, *, in_order: bool) -> None:
    """Run two forwards of different sizes, then both backward passes."""
    model.zero_grad()
    losses = [run(X[:rows]).square().mean() for rows in (512, 384)]
    for loss in losses if in_order else reversed(losses):
        loss.backward()


@pytest.mark.parametrize("in_order", [False, True])
def test_what_waits_follows_the_order_of_the_backward_passes(in_order: bool) -> None:
    """Backward was taken to run in the reverse order, so a step whose first forward ends first held more than its budget."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="80%")
    run = torch.compile(model, backend=backend, dynamic=False)
    for _ in range(3):
        in_flight(model, run, in_order=in_order)
    first, second = (plan.peak_bytes for plan in backend.plans)
    assert first is not None
    assert second is not None
    parameters = 4 * sum(p.numel() for p in model.parameters())
    waiting = second.waiting or 0
    assert waiting > parameters, "else this tests nothing"
    assert first.planned + (waiting if in_order else parameters) <= first.budget
    assert first.beside >= waiting if in_order else first.beside < waiting
    assert second.planned + (first.waiting or 0) <= second.budget


def test_two_backends_with_a_budget_each_in_one_step_are_a_warning() -> None:
    """Each layer compiled by name has a backend, and so a budget, of its own."""
    torch._dynamo.reset()
    layers = [nn.Linear(64, 64) for _ in range(3)]
    backends = [eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="100%") for _ in layers]
    runs = [torch.compile(layer, backend=backend) for layer, backend in zip(layers, backends, strict=True)]
    for run in runs:
        run(X).sum().backward()  # one after the other: nothing waits
    assert not [event for backend in backends for event in backend.events if event.kind == "limit"]
    with pytest.warns(fxprec.FxprecWarning, match=r"^peak_budget: .* tensors of another backend's graphs"):
        runs[2](runs[1](runs[0](X))).sum().backward()
    assert [sum(event.kind == "limit" for event in backend.events) for backend in backends] == [0, 1, 1]


def test_a_backend_for_all_layers_shares_one_budget() -> None:
    torch._dynamo.reset()
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="100%")
    runs = [torch.compile(nn.Linear(64, 64), backend=backend) for _ in range(3)]
    for _ in range(2):
        runs[2](runs[1](runs[0](X))).sum().backward()
    assert [plan.peak_bytes.graphs for plan in backend.plans if plan.peak_bytes] == [3, 3, 3]
    assert not [event for event in backend.events if event.kind == "limit"]


@pytest.mark.parametrize("strict", [False, True])
def test_graphs_that_save_more_than_an_activation_budget_together_are_a_warning(strict: bool) -> None:
    """Each graph was held to the budget by itself, and nothing said what the step saves."""
    model = blocks(2)
    whole = eager_backend("native", recipe="fp8", low_ratio=None)
    gradients(model, torch.compile(model, backend=whole))
    saved = [plan.saved_bytes.planned for plan in whole.plans if plan.saved_bytes]
    torch._dynamo.reset()
    backend = eager_backend("native", recipe="fp8", low_ratio=None, activation_budget=max(saved) + 1000, strict=strict)
    run = torch.compile(model, backend=backend)
    words = r"activation_budget: it bounds what each graph saves, .* and 2 graphs of the step save .* together"
    if strict:
        with pytest.raises(fxprec.FallbackError, match=words):
            gradients(model, run)
    else:
        with pytest.warns(fxprec.FxprecWarning, match=words):
            gradients(model, run)
        gradients(model, run)
        assert [event.site for event in backend.events if event.kind == "fallback"] == ["activation_budget"]


def test_backends_that_save_more_than_an_activation_budget_together_are_told() -> None:
    """Layers with a backend each had the budget each, and nothing said so."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"recipe": "fp8", "low_ratio": None, "activation_budget": "100KiB"}
    backends = [eager_backend("native", **options) for _ in range(3)]
    runs = [torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()), backend=backend) for backend in backends]
    for run in runs:
        run(X).sum().backward()  # one after the other: nothing waits
    assert not [event for backend in backends for event in backend.events if event.kind == "limit"]
    words = r"^activation_budget: it bounds what each graph saves, .*; graphs of other backends, .* save .* in the same"
    with pytest.warns(fxprec.FxprecWarning, match=words):
        runs[2](runs[1](runs[0](X))).sum().backward()
    assert "activation_budget" in {event.site for backend in backends for event in backend.events}


def test_graphs_within_an_activation_budget_together_are_not_told_of() -> None:
    model = blocks(2)
    backend = eager_backend("native", recipe="fp8", low_ratio=None, activation_budget=10**9, strict=True)
    gradients(model, torch.compile(model, backend=backend))
    assert not [event for event in backend.events if event.kind == "fallback"]


def test_graphs_inside_of_a_reentrant_checkpoint_share_one_budget() -> None:
    """Their forwards run in backward, where nobody looked, and each graph had the budget for itself."""
    model = blocks(2)
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="100%")
    run = torch.compile(model, backend=backend)
    for _ in range(3):
        checkpoint(run, X.clone().requires_grad_(), use_reentrant=True).backward()
    held = [plan.peak_bytes for plan in backend.plans if plan.peak_bytes is not None]
    assert [peak.graphs for peak in held] == [2, 2]
    assert held[1].beside >= (held[0].waiting or 0)
    assert all(peak.beside + peak.planned <= peak.budget for peak in held)
