"""Promotion: what overflows moves to high for good, with no retrace, and training recovers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from backend_helpers import STORAGES, Loud, eager_backend, mlp, narrow_recipe, relative_error
from torch import Tensor, nn

import fxprec
from fxprec import FxprecWarning, compat

EVERY_STORAGE = pytest.mark.parametrize("storage", STORAGES)


class Counter:
    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.function(*args, **options)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(compat.compile_fx)
    monkeypatch.setattr(compat, "compile_fx", counter)
    return counter


class Run:
    """A model, its uncompiled float32 twin, and the number of graphs Dynamo traced."""

    def __init__(
        self, storage: str, model: nn.Module | None = None, dynamic: bool | None = None, **options: Any
    ) -> None:
        torch._dynamo.utils.counters.clear()
        self.backend = eager_backend(storage, **{"recipe": narrow_recipe(storage), "low_ratio": 1.0, **options})
        self.model = model or Loud()
        self.reference = copy.deepcopy(self.model)
        self.compiled = torch.compile(self.model, backend=self.backend, dynamic=dynamic)

    def step(self, x: Tensor) -> float:
        """One forward and backward of both; return the error of the first layer's gradient."""
        for own, called in ((self.model, self.compiled), (self.reference, self.reference)):
            own.zero_grad()
            called(x).square().mean().backward()
        first, wanted = next(self.model.parameters()).grad, next(self.reference.parameters()).grad
        return relative_error(first * 1e3, wanted * 1e3)

    @property
    def promotions(self) -> dict[int, int]:
        """Number of promotions by step."""
        found: dict[int, int] = {}
        for event in self.backend.events:
            if event.kind == "promotion":
                found[event.step] = found.get(event.step, 0) + 1
        return found

    @property
    def traces(self) -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@EVERY_STORAGE
def test_offenders_of_a_step_move_together_in_cascades_without_a_retrace(storage: str, compilations: Counter) -> None:
    run = Run(storage)
    errors = [run.step(torch.randn(64, 16)) for _ in range(9)]
    if storage != "simulate":
        assert run.promotions == {1: 3}, "x * 1e4 and the ReLUs: in forward no copy hides what is behind it"
    else:
        assert list(run.promotions) == [1, 2, 3, 4], "each saturated tensor hid the next"
        assert run.promotions[1] == 2
    assert sum(run.promotions.values()) == len(run.backend.plans[0].promoted) == (3 if storage != "simulate" else 6)
    assert run.traces == 1
    assert compilations.calls == (1 if storage == "simulate" else 1 + len(run.promotions))
    assert errors[0] > 0.95
    # Where every reader gets the rounded value, that of 8-bit weights and gradients remains.
    assert errors[-1] < (0.1 if storage != "simulate" else 0.25)


@pytest.mark.parametrize("storage", STORAGES)
def test_nothing_is_promoted_where_promote_above_is_none(storage: str, compilations: Counter) -> None:
    run = Run(storage, promote_above=None)
    for _ in range(6):
        error = run.step(torch.randn(64, 16))
    assert run.promotions == {}
    assert run.backend.plans[0].promoted == ()
    assert compilations.calls == 1
    if storage == "native":
        assert 0.72 < error < 0.75, "clipped eight times as high: e4m3fn's copies are scaled down by 2^3"
    else:
        assert error > 0.95


def test_the_threshold_is_a_ratio_that_promotes_from_on() -> None:
    x = torch.zeros(10, 10)
    x.view(-1)[:2] = 1e6
    for limit, wanted in ((0.02, True), (0.021, False)):
        torch.compiler.reset()
        backend = eager_backend("simulate", recipe="hfp8", low_ratio=1.0, promote_above=limit)
        compiled = torch.compile(lambda x, w: (x * 1.0).sum() * w, backend=backend)
        compiled(x, torch.ones((), requires_grad=True)).backward()
        backend.stats()
        promoted = {site.tensor for site in backend.plans[0].promoted}
        assert ("x" in promoted) is wanted


@pytest.mark.parametrize("storage", STORAGES)
def test_promotion_under_dynamic_shapes_keeps_serving_other_batches(storage: str) -> None:
    run = Run(storage, dynamic=True)
    errors = [run.step(torch.randn(n, 16)) for n in (64, 32, 16, 7, 64, 33, 100, 8, 50)]
    assert len(run.backend.plans) == 1
    assert run.traces == 1
    assert run.promotions
    assert max(errors[-2:]) < 0.25


def test_the_table_changes_only_when_something_changed() -> None:
    run = Run("simulate")
    x, tables = torch.randn(64, 16), []
    for _ in range(12):
        run.step(x)
        tables.append(run.backend._graphs[0].controller.table)
    changes = [i + 1 for i, (a, b) in enumerate(itertools.pairwise(tables)) if a is not b]
    told = {event.step for event in run.backend.events}
    assert set(changes) <= told
    assert tables[-1] is tables[-4]
    assert not torch.equal(tables[0], tables[-1])


@pytest.mark.parametrize("limit", [0.01, None])
def test_a_nan_in_a_packed_tensor_is_told_and_promotes_at_once(limit: float | None) -> None:
    run = Run("packed", mlp(), promote_above=limit)
    x = torch.randn(64, 16)
    run.step(x)
    poisoned = x.clone()
    poisoned[3, 3] = torch.nan  # 1 of 1024: far below the threshold
    assert run.compiled(poisoned).isnan().any()
    remedy = "the tensor is promoted now" if limit else "hold the module high with keep_high"
    with pytest.warns(FxprecWarning, match=f"NaN stored as 30: 1-4-3.4 has no NaN.*{remedy}"):
        run.step(x)
    (told,) = (e for e in run.backend.events if e.kind == "nan")
    assert (told.step, told.detail) == (2, "NaN stored as 30: 1-4-3+4 has no NaN")
    promoted = [site.tensor for site in run.backend.plans[0].promoted]
    assert promoted == ([told.site.split(" ")[0]] if limit else [])
    assert all(torch.isfinite(p.grad).all() for p in run.model.parameters())


@pytest.mark.parametrize("storage", STORAGES)
def test_an_inf_in_a_batch_reaches_the_loss_and_who_skips_that_step_trains_on(storage: str) -> None:
    def run_with(bad: bool) -> tuple[Run, list[torch.Tensor]]:
        torch.manual_seed(0)
        run = Run(storage, mlp())
        for step in range(6):
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
            if bad and step == 3:
                x[3, 3] = torch.inf
                loss, wanted = (model(x).square().mean() for model in (run.compiled, run.reference))
                assert not loss.isfinite()
                assert not wanted.isfinite()
                loss.backward()
                assert not all(p.grad.isfinite().all() for p in run.model.parameters())
                run.model.zero_grad()
                with pytest.warns(FxprecWarning, match="inf stored as"):
                    run.backend.stats()
            else:
                run.step(x)
        return run, [p.grad for p in run.model.parameters()]

    run, gradients = run_with(bad=True)
    assert [e.kind for e in run.backend.events if e.kind in ("nonfinite", "promotion")] == ["nonfinite", "promotion"]
    for a, b in zip(gradients, run_with(bad=False)[1], strict=True):
        assert relative_error(a, b) < 0.2


@EVERY_STORAGE
def test_evaluation_follows_promotions_of_training(storage: str) -> None:
    run = Run(storage)
    x = torch.randn(64, 16)
    for step in range(6):
        if step == 1:
            with torch.no_grad():
                run.compiled(x)  # compiled before most promotions
        run.step(x)
    with torch.no_grad():
        error = relative_error(run.compiled(x), run.reference(x))
    training, evaluation = run.backend._graphs[0].plan, run.backend._graphs[1].plan
    assert {s.tensor for s in evaluation.promoted} == (
        {s.tensor for s in training.promoted} if storage == "simulate" else set()
    ), "evaluation stores nothing in real storage"
    assert error < (0.02 if storage != "simulate" else 0.1)


def test_promoted_ratio_counts_elements() -> None:
    run = Run("simulate")
    for _ in range(6):
        run.step(torch.randn(64, 16))
    plan: fxprec.Plan = run.backend.plans[0]
    outputs = 64 * (16 + 32 + 32 + 32 + 32 + 4)  # x * 1e4, two linear layers and their ReLUs, the last layer
    assert sum(site.elements for site in plan.promoted) == outputs
    assert plan.promoted_ratio == outputs / plan.total_elements


def test_the_mean_demoted_ratio_falls_by_what_a_promotion_takes_from_its_step_on() -> None:
    run = Run("simulate")
    ratios = []
    for _ in range(8):
        run.step(torch.randn(64, 16))
        ratios.append(run.backend.mean_demoted_ratio)
    plan = run.backend.plans[0]
    low = [  # of each step: what was promoted after step k is low in steps 1 to k
        plan.achieved_low_ratio - sum(s.elements for s in plan.promoted if s.promoted_at < step) / plan.total_elements
        for step in range(1, 9)
    ]
    assert ratios[0] == plan.achieved_low_ratio == 1.0
    assert ratios[-1] == pytest.approx(sum(low) / 8)
    assert low[-1] == plan.low_ratio < ratios[-1] < ratios[0], "the mean lies between the end's and the start's"
    site = next(s for s in plan.sites if s.direction == "forward" and s.promoted_at is None)
    other_run = plan.promote([site.id], step=1000)
    assert other_run.mean_demoted_ratio(8) == pytest.approx(
        plan.mean_demoted_ratio(8) - site.elements / plan.total_elements
    ), "promoted in the run whose plan this one follows: high throughout"
