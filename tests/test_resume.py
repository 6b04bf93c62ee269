"""A checkpoint in the middle of training resumes bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from backend_helpers import Loud, eager_backend
from models import Residual
from steps import losses_of
from torch import Tensor, nn

import fxprec

BEFORE, AFTER = 7, 20


class Training:
    """SGD on a model whose activations overflow 8 bits, over batches that depend on the step alone."""

    def __init__(self, storage: str, **options: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model = Loud()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        scaling = fxprec.GradScaling(interval=5)
        options = {"recipe": "hfp8", "low_ratio": 0.8, "grad_scaling": scaling, **options}
        self.backend = eager_backend(storage, **options)
        self.compiled = torch.compile(self.model, backend=self.backend)

    def run(self, start: int, stop: int) -> list[Tensor]:
        """Return the losses and, last, every parameter."""

        def batch(step: int) -> Tensor:
            loud = 5 if step == BEFORE - 1 else 1 + step % 3  # the scales have to remember the last batch saved
            return torch.randn(32, 16, generator=torch.Generator().manual_seed(step)) * loud

        losses = losses_of(self.compiled, self.optimizer, map(batch, range(start, stop)))
        return [*losses, *(p.detach().clone() for p in self.model.parameters())]

    def save(self) -> str:
        tensors = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.saved = tensors, [s["momentum_buffer"].clone() for s in self.optimizer.state.values()]
        return json.dumps(self.backend.state_dict())

    def load(self, other: Training, state: str) -> None:
        tensors, momenta = other.saved
        self.model.load_state_dict(tensors)
        for parameter, momentum in zip(self.model.parameters(), momenta, strict=True):
            self.optimizer.state[parameter]["momentum_buffer"] = momentum.clone()
        self.backend.load_state_dict(json.loads(state))


def graph_states(state: str) -> list[dict[str, Any]]:
    return json.loads(json.loads(state)["graphs"])


@pytest.mark.parametrize("storage", ["simulate", "packed"])
@pytest.mark.parametrize("when", ["before compilation", "after compilation"])
def test_resumed_training_is_bit_identical(storage: str, when: str) -> None:
    whole = Training(storage)
    whole.run(0, BEFORE)
    state = whole.save()
    assert whole.backend.plans[0].promoted, "the state holds promotions"
    scales = graph_states(state)[0]["scales"]
    assert scales is None if storage == "packed" else any(scales["exps"]), "and scales, where gradients are stored"
    plain = whole.run(BEFORE, BEFORE + AFTER)

    resumed = Training(storage)
    if when == "after compilation":
        resumed.run(0, 2)
        resumed.optimizer.zero_grad()
    resumed.load(whole, state)
    found = resumed.run(BEFORE, BEFORE + AFTER)
    for i, (a, b) in enumerate(zip(found, plain, strict=True)):
        assert torch.equal(a, b), f"value {i} of {AFTER} losses and the parameters"
    assert resumed.backend.plans[0] == whole.backend.plans[0]
    assert resumed.backend.state_dict() == whole.backend.state_dict()
    changed = any(event.step > BEFORE for event in whole.backend.events)
    assert changed or storage == "packed", "state changed later too: promotions hid one another, scales moved"


def test_saving_disturbs_nothing() -> None:
    plain = Training("packed").run(0, 10)
    saving = Training("packed")
    found: list[Tensor] = []
    for step in range(10):
        found = [*found[:step], *saving.run(step, step + 1)]
        saving.save()
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_a_state_holds_only_plain_data_and_survives_json() -> None:
    training = Training("simulate")
    training.run(0, 3)
    state = training.backend.state_dict()
    assert json.loads(json.dumps(state)) == state


def test_exact_calibration_is_not_repeated_on_resume() -> None:
    options = {"policy": "exact", "low_ratio": 0.5}
    first = Training("packed", **options)
    first.run(0, 3)
    state = first.save()
    resumed = Training("packed", **options)
    resumed.load(first, state)
    resumed.run(3, 4)
    assert resumed.backend.plans[0].formats == first.backend.plans[0].formats
    assert not any("calibration" in event.detail for event in resumed.backend.events)
    assert any("calibration" in event.detail for event in first.backend.events)


def test_a_state_takes_the_place_of_a_calibration_under_way() -> None:
    options = {"policy": "exact", "low_ratio": 0.5}
    first, resumed = Training("packed", **options), Training("packed", **options)
    first.run(0, 3)
    state = first.save()
    torch.compiler.reset()
    resumed.compiled(torch.ones(32, 16))
    assert resumed.backend.all_plans == (None,), "no backward has measured anything yet"
    resumed.load(first, state)
    resumed.run(3, 4)
    assert resumed.backend.plans[0].formats == first.backend.plans[0].formats
    assert not any("calibration step" in event.detail for event in resumed.backend.events)


@pytest.mark.parametrize("how", ["resumed", "reset", "evaluated"])
def test_what_the_calibration_step_measured_is_kept_before_the_next_step_plans(how: str) -> None:
    """The plan was made when the next step began, so a state between the two had none: a resumed run measured anew."""
    options = {"policy": "exact", "low_ratio": 0.5}
    first, again = Training("packed", **options), Training("packed", **options)
    whole = first.run(0, 3)
    again.run(0, 1)
    if how == "resumed":
        state, before = again.save(), again
        again = Training("packed", **options)
        again.load(before, state)
    elif how == "reset":
        torch.compiler.reset()
    else:
        with torch.no_grad():
            again.compiled(torch.randn(32, 16))
        training, evaluation = again.backend.all_plans
        assert training is not None
        assert evaluation is not None
        assert evaluation.low_groups == training.low_groups != frozenset()
    found = again.run(1, 3)
    assert all(torch.equal(a, b) for a, b in zip(found, whole[1:], strict=True))
    assert again.backend.plans == first.backend.plans


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("when", ["before compilation", "after compilation"])
def test_a_distributed_checkpoint_loads_into_a_fresh_backend(when: str, tmp_path: Path) -> None:
    first = Training("simulate")
    first.run(0, BEFORE)
    first.save()
    checkpoint.save({"fxprec": first.backend}, checkpoint_id=tmp_path)
    plain = first.run(BEFORE, BEFORE + 5)

    resumed = Training("simulate")
    if when == "after compilation":
        resumed.run(0, 1)
        resumed.optimizer.zero_grad()
    resumed.load(first, json.dumps(fxprec.Backend().state_dict()))  # the tensors alone
    checkpoint.load({"fxprec": resumed.backend}, checkpoint_id=tmp_path)
    found = resumed.run(BEFORE, BEFORE + 5)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert resumed.backend.state_dict() == first.backend.state_dict()


def test_a_loaded_state_is_saved_again_before_anything_is_compiled(tmp_path: Path) -> None:
    training = Training("simulate")
    training.run(0, 3)
    state = training.backend.state_dict()
    torch.save(state, tmp_path / "state.pt")
    fresh = Training("simulate").backend
    assert fresh.state_dict().keys() == state.keys()
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert fresh.state_dict() == state


def test_evaluation_may_come_first_and_follows_the_loaded_plan() -> None:
    first = Training("simulate")
    first.run(0, BEFORE)
    state = first.backend.state_dict()
    resumed = Training("simulate")
    resumed.backend.load_state_dict(state)
    with torch.no_grad():
        resumed.compiled(torch.randn(32, 16))
    promoted = {site.tensor for site in first.backend.plans[0].promoted}
    assert {site.tensor for site in resumed.backend.all_plans[0].promoted} == promoted
    resumed.run(BEFORE, BEFORE + 1)
    assert {site.tensor for site in resumed.backend.plans[0].promoted} == promoted
    resumed.backend.load_state_dict(state)  # the graphs are in another order now
    assert resumed.backend.controllers[1].step == BEFORE


@pytest.mark.parametrize("storage", ["simulate", "packed"])
def test_a_reset_of_the_compiler_forgets_no_state(storage: str) -> None:
    plain = Training(storage).run(0, BEFORE + 3)
    training = Training(storage)
    training.run(0, BEFORE)
    state = training.backend.state_dict()
    torch.compiler.reset()
    assert training.backend.state_dict() == state
    found = training.run(BEFORE, BEFORE + 3)
    assert all(torch.equal(a, b) for a, b in zip(found, plain[BEFORE:], strict=True))
    assert [c.step for c in training.backend.controllers] == [BEFORE + 3]
    assert len(training.backend.plans) == len(graph_states(json.dumps(training.backend.state_dict()))) == 1
    assert any(event.kind == "promotion" and event.step < BEFORE for event in training.backend.events)


def test_a_reset_reaches_the_backend_behind_the_name() -> None:
    compiled = torch.compile(Loud(), backend="fxprec", options={"recipe": "hfp8", "lowering": "eager"})
    for _ in range(2):
        compiled(torch.randn(8, 16)).sum().backward()
        torch.compiler.reset()
    backend = fxprec.backend_of(compiled)
    assert [controller.step for controller in backend.controllers] == [2]


def test_states_of_version_2_load() -> None:
    training = Training("simulate")
    training.run(0, BEFORE)
    state = training.backend.state_dict()
    graphs = [{key: value for key, value in g.items() if key != "graph"} for g in json.loads(state["graphs"])]
    fresh = Training("simulate")
    fresh.backend.load_state_dict({"version": 2, "graphs": graphs})
    fresh.run(BEFORE, BEFORE + 1)
    assert fresh.backend.plans[0].promoted == training.backend.plans[0].promoted


def block() -> nn.Module:
    """A residual block whose norm is an affine function of what the block before stored."""
    return Residual(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))


@pytest.mark.parametrize("keep_high", [("3",), ("1", "3"), ()])
def test_a_plan_made_for_a_budget_is_followed_exactly(keep_high: tuple[str, ...]) -> None:
    """Copies beside those of high groups got other formats from the chooser, and more was recomputed from them."""

    def train(steps: int, state: dict[str, Any] | None = None) -> tuple[list[Tensor | None], dict[str, Any]]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), block(), block(), block(), nn.Conv2d(16, 1, 3, padding=1))
        config = fxprec.Config(recipe="fp8", lowering="eager", peak_budget="95%", keep_high=keep_high)
        backend = fxprec.Backend(config)
        compiled = torch.compile(model, backend=backend)
        if state is not None:
            backend.load_state_dict(state)
        x = torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(3))
        for _ in range(steps):
            model.zero_grad()
            saved = backend.state_dict()
            compiled(x).square().mean().backward()
        return [p.grad for p in model.parameters()], saved

    wanted, state = train(3)
    found, _ = train(1, state)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine is not None
        assert torch.equal(mine, theirs)
