"""The state of all ranks as one object, here of one process: what it takes and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn

import fxprec
from fxprec.integrations import RankStates, compile_layers, rank_states
from tests.integrations.small import OPTIONS, Loud, batch


def two_layers() -> nn.Module:
    model = nn.Sequential(Loud(), nn.Linear(4, 8), Loud())
    compile_layers(model, Loud, OPTIONS)
    return model


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    model = two_layers()
    for step in range(3):
        model(batch(step)).sum().backward()
    return model


def test_each_compiled_layer_keeps_its_own(trained: nn.Module) -> None:
    state = RankStates(trained).state_dict()
    assert json.loads(json.dumps(state)) == state
    other = two_layers()
    assert RankStates(other).state_dict().keys() == state.keys()
    RankStates(other).load_state_dict(state)
    assert RankStates(other).state_dict() == state
    for name in ("0", "2"):
        wanted, found = (fxprec.backend_of(model.get_submodule(name)) for model in (trained, other))
        assert found.state_dict() == wanted.state_dict()
        assert wanted.plans[0].promoted


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_loads_into_a_fresh_model(trained: nn.Module, tmp_path: Path) -> None:
    checkpoint.save({"fxprec": RankStates(trained)}, checkpoint_id=tmp_path)
    other = two_layers()
    checkpoint.load({"fxprec": RankStates(other)}, checkpoint_id=tmp_path)
    assert RankStates(other).state_dict() == RankStates(trained).state_dict()


def test_equal_states_of_ranks_are_kept_once() -> None:
    packed = rank_states._packed(['{"": 1}', '{"": 2}', '{"": 1}'])
    assert json.loads(packed["ranks"]) == {"state_of_rank": [0, 1, 0], "states": [{"": 1}, {"": 2}]}


def test_another_number_of_ranks_is_told_and_takes_the_first(trained: nn.Module) -> None:
    own = json.dumps(json.loads(RankStates(trained).state_dict()["ranks"])["states"][0])
    other = RankStates(two_layers())
    with pytest.warns(fxprec.FxprecWarning, match=r"saved by 3 ranks, loaded by 1: .* does not continue bit for bit"):
        other.load_state_dict(rank_states._packed([own] * 3))
    assert other.state_dict() == RankStates(trained).state_dict()


def test_a_model_compiled_in_other_places_is_refused(trained: nn.Module) -> None:
    whole = torch.compile(nn.Sequential(Loud()), backend="fxprec", options=OPTIONS)
    with pytest.raises(fxprec.PlanError, match=r"compiled modules '0', '2', this model has the whole model; compile"):
        RankStates(whole).load_state_dict(RankStates(trained).state_dict())


@pytest.mark.parametrize(
    "state",
    [{}, None, {"version": 2, "ranks": "{}"}, {"version": 1, "ranks": "{"}, {"version": 1, "ranks": "[1]"},
     {"version": 1, "ranks": '{"states": [], "state_of_rank": [0]}'}, fxprec.Backend().state_dict(),
     {"version": 1, "ranks": "[" * 100_000}],
)  # fmt: skip
def test_a_damaged_state_is_refused_in_one_line(state: Any, trained: nn.Module) -> None:
    with pytest.raises(fxprec.PlanError, match=r"not a state of fxprec\.integrations\.RankStates .* pass what its"):
        RankStates(trained).load_state_dict(state)


def test_a_model_without_a_backend_is_told_before_the_first_checkpoint() -> None:
    with pytest.raises(fxprec.ConfigError, match="fxprec compiled no part of this Linear"):
        RankStates(nn.Linear(1, 1))
