"""Several training graphs of one model, one for each batch length: they promote together, and resume each for itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from backend_helpers import Loud, eager_backend
from torch import Tensor, nn

import fxprec

LONG, SHORT = 32, 24


class Training:
    """SGD on a model whose activations overflow 8 bits where the batch is loud; a graph for each batch length."""

    def __init__(self, storage: str, **options: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model: nn.Module = Loud()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-4)
        scaling = fxprec.GradScaling(interval=3)
        given = {"recipe": "hfp8", "low_ratio": 0.8, "grad_scaling": scaling, **options}
        self.backend = eager_backend(storage, **given)
        self.compiled = torch.compile(self.model, backend=self.backend, dynamic=False)

    def step(self, length: int, number: int, loudness: float = 1.0) -> Tensor:
        x = torch.randn(length, 16, generator=torch.Generator().manual_seed(number)) * loudness
        loss = self.compiled(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def promoted(self) -> list[set[tuple[str, str]]]:
        return [{(s.tensor, s.kind) for s in plan.promoted} for plan in self.backend.plans]


@pytest.mark.parametrize("storage", ["simulate", "packed"])
def test_what_overflows_at_one_length_is_promoted_at_all(storage: str) -> None:
    training = Training(storage)
    training.step(LONG, 0, loudness=1e-4)
    training.step(SHORT, 1, loudness=1e-4)
    assert training.promoted() == [set(), set()]
    training.step(LONG, 2, loudness=5)
    training.step(SHORT, 3, loudness=1e-4)  # finds what the long graph has seen, before that runs again
    long, short = training.promoted()
    assert short
    assert short == long
    told = [e for e in training.backend.events if e.detail.endswith("promoted in graph 0, of the same model")]
    assert len(told) == len(short)
    in_force = [graph.compiled.plan for graph in training.backend._graphs]
    assert in_force[1] is not None
    assert len(in_force[1].promoted) == len(short), "and its code follows"
    training.step(16, 4, loudness=1e-4)
    assert training.promoted()[2] == long, "a graph compiled later too"


def test_where_nothing_may_be_promoted_nothing_is_shared() -> None:
    training = Training("simulate", promote_above=None)
    for number, length in enumerate((LONG, SHORT, LONG, SHORT)):
        training.step(length, number, loudness=5)
    assert training.promoted() == [set(), set()]


ORDERS = {"the same order": (LONG, SHORT), "the other order": (SHORT, LONG)}


def run(training: Training, first: tuple[int, int], start: int, stop: int) -> list[Tensor]:
    """Train in turn at both lengths, from step ``start`` on with the lengths in that order."""
    return [training.step(first[n % 2], n, loudness=5 if n % 4 == 3 else 1) for n in range(start, stop)]


@pytest.mark.parametrize(
    ("order", "when"),
    [
        ("the same order", "before compilation"),
        ("the other order", "after compilation"),
        pytest.param("the other order", "before compilation", marks=pytest.mark.full),
        pytest.param("the same order", "after compilation", marks=pytest.mark.full),
    ],
)
def test_states_find_their_graphs_whatever_comes_first(order: str, when: str) -> None:
    whole = Training("packed")
    run(whole, (LONG, SHORT), 0, 5)  # an odd number: their scales and steps differ
    state = json.dumps(whole.backend.state_dict())
    tensors = {name: value.clone() for name, value in whole.model.state_dict().items()}
    assert any(whole.promoted())
    wanted = run(whole, ORDERS[order], 5, 13)

    resumed = Training("packed")
    if when == "after compilation":
        run(resumed, ORDERS[order], 0, 2)
    resumed.model.load_state_dict(tensors)
    resumed.backend.load_state_dict(json.loads(state))
    found = run(resumed, ORDERS[order], 5, 13)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    by_step = sorted(whole.backend.controllers, key=lambda c: c.step)
    assert [c.plan for c in sorted(resumed.backend.controllers, key=lambda c: c.step)] == [c.plan for c in by_step]


def test_a_state_of_other_lengths_is_taken_in_order() -> None:
    whole = Training("packed")
    run(whole, (LONG, SHORT), 0, 5)
    resumed = Training("packed")
    resumed.backend.load_state_dict(whole.backend.state_dict())
    resumed.step(7, 0)
    assert resumed.backend.controllers[0].step == whole.backend.controllers[0].step + 1
