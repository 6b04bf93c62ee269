"""Copies and pickles of compiled models, and of backends: compiled models with a state of their own."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from backend_helpers import Loud
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxprec

OPTIONS: dict[str, Any] = {"recipe": "hfp8", "low_ratio": 1.0, "lowering": "eager", "storage": "simulate"}


def compiled_by_name() -> Any:
    return torch.compile(Loud(), backend="fxprec", options=OPTIONS)


def compiled_by_instance() -> Any:
    return torch.compile(Loud(), backend=fxprec.Backend(fxprec.Config(**OPTIONS)))


WAYS = pytest.mark.parametrize("make", [compiled_by_name, compiled_by_instance])


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    model.zero_grad()
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        (compiled_by_name, copy.deepcopy),
        (compiled_by_instance, saved_and_loaded),
        pytest.param(compiled_by_name, saved_and_loaded, marks=pytest.mark.full),
        pytest.param(compiled_by_instance, copy.deepcopy, marks=pytest.mark.full),
    ],
)
def test_a_copy_of_a_trained_model_is_compiled_and_goes_on_for_itself(make, copied) -> None:
    model = make()
    train(model)
    backend = fxprec.backend_of(model)
    state = backend.state_dict()
    assert backend.plans[0].promoted

    twin = copied(model)
    other = fxprec.backend_of(twin)
    assert other is not backend
    assert other.config == backend.config
    assert other.state_dict() == state, "plans, promotions and scales come along"
    found = train(twin)
    assert len(other.plans) == len(backend.plans) == 1, "each is compiled, once"
    assert backend.state_dict() == state, "the original is unaffected"
    assert all(torch.equal(a, b) for a, b in zip(found, train(model), strict=True))


@WAYS
def test_a_copy_before_the_first_step_has_a_backend_of_its_own(make) -> None:
    model = make()
    twin, shallow = copy.deepcopy(model), copy.copy(model)
    assert fxprec.backend_of(twin) is not fxprec.backend_of(model)
    assert fxprec.backend_of(shallow) is fxprec.backend_of(model), "the same parameters, the same compiled code"
    train(twin, 1)
    train(shallow, 1)
    assert [len(fxprec.backend_of(m).plans) for m in (model, twin)] == [1, 1]


def test_many_copies_and_collections_leave_the_process_alive() -> None:
    model = compiled_by_name()
    train(model, 1)
    for _ in range(2):
        twins = [copy.deepcopy(model) for _ in range(10)]
        del twins[:9]
        gc.collect()  # two copies of a weak reference to a storage, as Dynamo's fake tensors have, would free it twice
    train(twins[0], 1)


def test_a_moving_average_of_a_compiled_model_evaluates_with_its_promotions() -> None:
    model = compiled_by_name()
    train(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        average.update_parameters(model)
        x = torch.randn(8, 16)
        found, wanted = average(x), model(x)
    assert found.isfinite().all()
    assert wanted.isfinite().all()
    own = fxprec.backend_of(average.module)
    promoted = {site.tensor for site in fxprec.backend_of(model).plans[0].promoted}
    assert promoted
    assert {site.tensor for plan in own.all_plans for site in plan.promoted} == promoted


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda backend: pickle.loads(pickle.dumps(backend))])
def test_a_copied_backend_shares_nothing(copied) -> None:
    model = compiled_by_instance()
    train(model)
    backend = fxprec.backend_of(model)
    twin = copied(backend)
    assert twin.state_dict() == backend.state_dict()
    assert twin.plans == (), "it compiles anew"


def test_a_copy_of_a_module_compiled_in_place_is_uncompiled_as_torch_leaves_it() -> None:
    model = Loud()
    model.compile(backend="fxprec", options=OPTIONS)
    with pytest.raises(fxprec.ConfigError, match=r"a copy of a module compiled in place is uncompiled"):
        fxprec.backend_of(copy.deepcopy(model))
