"""The doctor on a running training: its own plan, promotions and scales, and training goes on as if nobody had asked."""

import copy
import math
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.runtime.scaling.copies import CopyScales

FEW = {"formats": ("bf16",), "reruns": 2}


class Training:
    """A model that trains by its own loop."""

    def __init__(self, **options) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 4),
        )
        self.call = torch.compile(
            self.model, backend="fxprec", options={"recipe": "fp8", "lowering": "eager", **options}
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.count = 0

    def batch(self) -> torch.Tensor:
        return torch.randn(64, 16, generator=torch.Generator().manual_seed(self.count))

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, self.batch()[:, :4].argmax(1))

    def step(self) -> torch.Tensor:
        self.count += 1
        torch.manual_seed(self.count)
        loss = self.loss(self.call(self.batch()))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def steps(self, count: int) -> "Training":
        for _ in range(count):
            self.step()
        return self

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.fixture(scope="module")
def usual():
    """Weights of five steps, of which none was looked at."""
    return Training().steps(5).weights


def test_a_step_that_is_examined_is_a_step_like_any_other(usual):
    training = Training().steps(3)
    backend = fxprec.backend_of(training.call)
    found = fxprec.doctor(backend, training.step, options=FEW)
    training.step()
    assert all(torch.equal(value, usual[name]) for name, value in training.weights.items())
    assert backend.controllers[0].step == 5
    assert (found.model, math.isfinite(found.loss)) == ("running backend", True)
    assert {row.tensor for row in found.ranking} == {s.tensor for s in backend.plans[0].sites if s.format == "e4m3fn"}
    assert found.whole[0].measured == pytest.approx(found.whole[0].predicted, rel=0.3)


def test_a_batch_is_examined_beside_the_training_as_the_module_would_be(usual):
    training = Training().steps(4)
    backend = fxprec.backend_of(training.call)
    before = copy.deepcopy(backend.state_dict())
    x = training.batch()
    without_scales = property(lambda self: (0,) * len(self.graph.copies))  # a module that has not trained has none
    with mock.patch.object(CopyScales, "exps", without_scales):
        found = fxprec.doctor(training.call, x, loss=training.loss, options=FEW)
        alone = fxprec.doctor(training.model, x, loss=training.loss, options={"recipe": "fp8", **FEW})
    assert found.to_dict() | {"seconds": 0, "recommended": 0, "advice": 0} == alone.to_dict() | {
        "seconds": 0, "recommended": 0, "advice": 0
    }  # fmt: skip
    assert found.recommended == {"recipe": "fp8", "lowering": "eager"}
    assert backend.state_dict() == before
    assert all(p.grad is None for p in training.model.parameters())
    training.step()
    assert all(torch.equal(value, usual[name]) for name, value in training.weights.items())


def test_promotions_of_the_run_are_in_force():
    training = Training()
    with torch.no_grad():
        training.model[0].weight.mul_(1e4)  # its result overflows e4m3fn
    training.steps(3)
    backend = fxprec.backend_of(training.call)
    (promoted,) = backend.plans[0].promoted
    found = fxprec.doctor(training.call, training.batch(), loss=training.loss, options=FEW)
    row = next(row for row in found.ranking if row.site == promoted.id)
    assert row.format == "bf16"
    alone = fxprec.doctor(training.model, training.batch(), loss=training.loss, options={"recipe": "fp8", **FEW})
    assert next(row for row in alone.ranking if row.site == promoted.id).format == "e4m3fn"


def test_what_has_not_trained_yet_is_examined_with_its_options():
    training = Training(keep_high=("4",))
    found = fxprec.doctor(training.call, training.batch(), loss=training.loss, options=FEW)
    assert found.recommended["keep_high"] == ("4",)
    assert not fxprec.backend_of(training.call).plans


def test_scales_of_the_run_are_in_force():
    training = Training(recipe="hfp8").steps(4)
    found = fxprec.doctor(fxprec.backend_of(training.call), training.step, options=FEW)
    assert found.ranking[0].damage < 0.3
    assert any("gradient" in note for note in found.notes)


def test_bad_input_is_one_line_that_teaches():
    training = Training().steps(1)
    backend, step = fxprec.backend_of(training.call), training.step
    fresh = fxprec.Backend(fxprec.Config(recipe="fp8"))
    for arguments, options, words in (
        ((fresh, step), {}, "running backend has compiled no training graph yet; let it train a step, then ask"),
        (
            (backend, torch.ones(3)),
            {},
            "args is Tensor; with a Backend give a function that runs one or a few training",
        ),
        (
            (backend, step),
            {"recipe": "bf16"},
            "'recipe' is not an option for a running backend, whose own options stay in",
        ),
        ((backend, step), 3, "options is 3; give it a dict of formats, tolerance, reruns"),
        (
            (backend, int),
            {},
            "running backend: the step ran no graph that trains, forward and backward; give a batch of",
        ),
    ):
        with pytest.raises(fxprec.ConfigError, match=re.escape(words)):
            fxprec.doctor(*arguments, options=options)
    with pytest.raises(fxprec.ConfigError, match="loss has no effect with a function that runs the step"):
        fxprec.doctor(backend, step, loss=training.loss)
    with pytest.raises(ZeroDivisionError):
        fxprec.doctor(backend, lambda: 1 / 0)
    training.step()  # as before
