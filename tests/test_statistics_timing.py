"""When statistics arrive decides no number: a GPU's copies stand in for, late at random, on a CPU."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aps.aps_ranks import run_ranks
from backend_helpers import Loud, eager_backend
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fxprec
from fxprec.runtime import losses, on_device, stats

STEPS, SAVED = 12, 5
Arrivals = Callable[[float], None]


class Copy:
    """A copy on its way and its event: NaN until it has arrived, by chance or because it was waited for."""

    def __init__(self, x: Tensor, chance: Callable[[], bool]) -> None:
        self._x, self._chance = x.detach().clone(), chance
        self.host = torch.full_like(x, torch.nan)

    def query(self) -> bool:
        if self._chance():
            self.synchronize()
        return torch.equal(self.host, self._x)

    def synchronize(self) -> None:
        self.host.copy_(self._x)


def delay(patch: pytest.MonkeyPatch, seed: int, share: Callable[[], float]) -> None:
    """Count steps as on a GPU. ``share``: how likely a copy has arrived when one asks."""
    chances = random.Random(seed)

    def to_host(x: Tensor) -> tuple[Tensor, Any]:
        found = Copy(x, lambda: chances.random() < share())
        return found.host, found

    patch.setattr(on_device, "to_host", to_host)
    patch.setitem(stats.STEPS_LATE, "cpu", stats.STEPS_LATE["cuda"])


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Count steps as on a GPU; return a function that sets how likely a copy has arrived when one asks."""
    now = {"share": 1.0}
    delay(monkeypatch, 0, lambda: now["share"])
    return lambda share: now.update(share=share)


class Training:
    """SGD on a model whose activations overflow 8 bits, over batches that depend on the step alone."""

    def __init__(self, **options: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model = Loud()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        given = {"recipe": "hfp8", "low_ratio": 0.8, "grad_scaling": fxprec.GradScaling(interval=3), **options}
        self.backend = eager_backend("simulate", **given)
        self.compiled = torch.compile(self.model, backend=self.backend)
        self.told: list[Any] = []

    def batch(self, number: int) -> Tensor:
        return torch.randn(32, 16, generator=torch.Generator().manual_seed(number)) * (1 + number % 3)

    def step(self, number: int, between: Callable[[], object] | None = None) -> None:
        """Train; note the loss, gradients, scales and promotions in force; call ``between`` before backward."""
        self.optimizer.zero_grad()
        loss = self.compiled(self.batch(number)).square().mean()
        if between is not None:
            between()
        loss.backward()
        self.optimizer.step()
        (graph,) = (g for g in self.backend._graphs if g.is_training)
        norms = [float(p.grad.norm()) for p in self.model.parameters() if p.grad is not None]
        keeper = None if graph.controller is None else graph.controller.keeper
        in_force = graph.compiled.plan
        assert in_force is not None
        self.told.append((float(loss.detach()), norms, keeper and tuple(keeper.exps), len(in_force.promoted)))

    def run(self, start: int = 0, stop: int = STEPS) -> list[Any]:
        for number in range(start, stop):
            self.step(number)
        return self.told


def test_equal_runs_have_equal_bits_however_late_statistics_arrive(arrivals: Arrivals) -> None:
    found = []
    for share in (1.0, 0.3, 0.0):
        arrivals(share)
        found.append(Training().run())
    assert len({told[2] for told in found[0]}) > 2, "scales move"
    assert len({told[3] for told in found[0]}) > 1, "and formats"
    for other in found[1:]:
        assert other == found[0]


def test_statistics_act_two_steps_later_on_a_gpu_and_one_later_on_a_cpu(arrivals: Arrivals) -> None:
    found = {"cuda": promotions(Training(grad_scaling="none"))}
    stats.STEPS_LATE["cpu"] = 1
    found["cpu"] = promotions(Training(grad_scaling="none"))
    assert found["cpu"] == [1, 2], "a cascade: each tensor hides the next"
    assert found["cuda"] == [2, 4]


def promotions(training: Training) -> list[int]:
    """Return the steps after which tensors were promoted."""
    for _ in range(8):
        training.step(2)
    return sorted({event.step for event in training.backend.events if event.kind == "promotion"})


@pytest.mark.parametrize("between", [False, True], ids=["after the step", "before backward"])
def test_asking_for_the_state_changes_nothing(between: bool, arrivals: Arrivals) -> None:
    arrivals(0.5)
    wanted = Training().run()
    asking = Training()

    def ask() -> None:
        asking.backend.state_dict()
        asking.backend.stats()
        asking.backend.stats(wait=False)

    for number in range(STEPS):
        asking.step(number, ask if between else None)
        if not between:
            ask()
    assert asking.told == wanted


@pytest.mark.parametrize("saved", [1, 2, SAVED])
def test_a_resumed_run_goes_on_bit_for_bit(saved: int, arrivals: Arrivals) -> None:
    arrivals(0.5)
    whole = Training()
    whole.run(0, saved)
    state = json.dumps(whole.backend.state_dict())
    weights = {name: value.clone() for name, value in whole.model.state_dict().items()}
    pending = json.loads(json.loads(state)["graphs"])[0]["pending"]
    assert [step["step"] for step in pending] == [None], "the last step's, which is acted on after the next"
    wanted = whole.run(saved, STEPS)[saved:]

    resumed = Training()
    resumed.backend.load_state_dict(json.loads(state))
    resumed.model.load_state_dict(weights)
    assert resumed.run(saved, STEPS) == wanted


@pytest.mark.parametrize("late", [1, 2])
def test_evaluation_is_the_same_whether_the_state_was_asked_for_or_not(late: int, arrivals: Arrivals) -> None:
    """Asking acted on statistics at once, so that evaluation followed promotions that training had not."""
    stats.STEPS_LATE["cpu"] = late
    found = []
    for asks in (False, True):
        training = Training()
        for number in range(4):
            training.step(number)
            if asks:
                training.backend.state_dict()
            with torch.no_grad():
                training.told.append(training.compiled(torch.ones(32, 16)).tolist())
        found.append(training.told)
    assert found[0] == found[1]


def test_evaluation_changes_no_step_of_training(arrivals: Arrivals) -> None:
    wanted = Training().run(0, 6)
    evaluating = Training()
    for number in range(6):
        evaluating.step(number)
        with torch.no_grad():
            evaluating.compiled(torch.ones(32, 16))
    assert evaluating.told == wanted


def test_a_loss_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = losses.LossWatch()
    copy = Copy(torch.tensor(torch.inf), lambda: False)
    watch.note(1, 1.0)
    watch._pending.append((2, copy.host, copy))  # type: ignore[arg-type]
    assert [str(jump) for jump in watch.jumps(before=3)] == ["the loss became inf from about inf at step 2"]


def test_statistics_of_a_row_that_no_plan_has_are_refused() -> None:
    training = Training()
    training.run(0, 2)
    (graph,) = json.loads(training.backend.state_dict()["graphs"])
    row = dict.fromkeys(("overflow_ratio", "underflow_ratio", "amax", "rms", "nonzero_ratio", "mean_ln", "std_ln"), 0.0)
    graph["pending"] = [{"step": None, "statistics": [{"site": 10_000, **row, "counts": []}]}]
    with pytest.raises(fxprec.PlanError, match=r"statistics of row 10000, which its plan does not have; load it where"):
        training.backend.load_state_dict({"version": 3, "graphs": [graph]})
    graph["pending"][0]["statistics"][0]["amax"] = "many"
    with pytest.raises(fxprec.PlanError, match=r"pending\[0\]\.statistics\[0\]\.amax: is 'many'; it must be a finite"):
        training.backend.load_state_dict({"version": 3, "graphs": [graph]})


class OnRank(Training):
    """A rank under DDP. Activations overflow in the same steps on all ranks."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches
        self.compiled = DistributedDataParallel(self.compiled)

    def batch(self, number: int) -> Tensor:
        return super().batch(10 * number + self.batches) * (1 + number % 3)


def on_two_ranks(rank: int, world: int) -> dict[str, Any]:
    """What a rank was told, its weights after and when it promoted, by share of copies that are there in time."""
    found: dict[str, Any] = {}
    runs = {"all": (1.0, rank), "some": (0.4, rank), "none": (0.0, rank), "one rank's": (float(rank), 0)}
    for name, (share, batches) in runs.items():
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            delay(patch, rank, lambda share=share: share)
            training = OnRank(batches)
            told = training.run()
        weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
        promoted = [event.step for event in training.backend.events if event.kind == "promotion"]
        found[name] = {"told": repr(told), "weights": weights, "promoted": promoted}
    return found


def test_ranks_act_on_statistics_in_the_same_steps_however_late_they_arrive() -> None:
    first, second = run_ranks(2, on_two_ranks)
    for late in ("some", "none"):
        for rank in (first, second):
            assert rank[late]["told"] == rank["all"]["told"], "losses, gradients, scales and promotions of each step"
            assert torch.equal(rank[late]["weights"], rank["all"]["weights"])
        assert torch.equal(first[late]["weights"], second[late]["weights"]), "replicas"
    assert first["all"]["told"] != second["all"]["told"], "batches and scales are each rank's own"
    assert len(first["one rank's"]["promoted"]) > 1
    assert first["one rank's"]["promoted"] == second["one rank's"]["promoted"]
    assert first["one rank's"]["told"] == second["one rank's"]["told"], "of equal batches"
