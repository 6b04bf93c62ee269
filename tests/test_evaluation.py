"""Evaluation before and after training: its plan is that of training, and its results are the uncompiled model's."""

from __future__ import annotations

import warnings

import pytest
import torch
from backend_helpers import STORED, Cnn, assert_close, compare, eager_backend, mlp
from torch import Tensor, nn

import fxprec

EVERY_STORAGE = pytest.mark.parametrize("storage", STORED)


@EVERY_STORAGE
def test_evaluation_follows_training(storage: str) -> None:
    backend = eager_backend(storage, low_ratio=0.4)
    compiled, reference = compare(Cnn, [(torch.randn(4, 3, 8, 8),)], backend)
    compiled.eval()
    reference.eval()
    x = torch.randn(4, 3, 8, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(compiled(x), reference(x), "evaluation")
    assert len(backend.plans) == 1  # training graphs only
    training, evaluation = backend._graphs[0].plan, backend._graphs[1].plan
    assert training is not None
    assert evaluation is not None
    assert [g.low for g in evaluation.groups] == [g.low for g in training.groups]
    assert 0 < len(training.low_groups) < len(training.groups)


@EVERY_STORAGE
def test_evaluation_before_training_follows_it_from_then_on(storage: str) -> None:
    """Without gradients a graph counts other sizes, and its own solution is another one."""
    backend = eager_backend(storage, low_ratio=0.4)
    # The wide frozen input weighs more without the gradients of the rest.
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 40))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    compiled, x = torch.compile(model, backend=backend), torch.randn(8, 16)
    with torch.no_grad():
        assert_close(compiled(x), model(x), "evaluation")
    evaluation = backend._graphs[0]
    assert evaluation.plan is not None
    alone = evaluation.plan.low_groups
    compiled(x).sum().backward()
    with torch.no_grad():
        assert_close(compiled(x), model(x), "evaluation")
    assert not evaluation.is_training
    assert evaluation.plan.low_groups == backend.plans[0].low_groups != alone


@EVERY_STORAGE
def test_evaluation_before_the_calibration_of_exact_stays_high_and_then_follows_training(storage: str) -> None:
    """A sanity check before training, as Lightning's, finds no damage measured."""
    recipe = fxprec.Recipe(hi="1-8-22", lo_forward="1-4-3", lo_backward="1-5-2")
    backend = eager_backend(storage, policy="exact", recipe=recipe)
    model, x = mlp(), torch.randn(8, 16)
    compiled = torch.compile(model, backend=backend)

    def evaluated() -> Tensor:
        with torch.no_grad():
            return compiled(x)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_close(evaluated(), model(x).detach(), "evaluation")
    told = [w for w in seen if "policy 'exact' measures damage in the first training step" in str(w.message)]
    assert len(told) == (storage == "simulate"), "else evaluation rounds nothing anyway"
    for _ in range(3):
        compiled(x).sum().backward()
        evaluated()
    evaluation, training = backend.all_plans
    assert evaluation is not None
    assert training is not None
    assert evaluation.low_groups == training.low_groups != frozenset()
