"""Accelerate: 20 steps, save_state, resume bit for bit, in plain precision and in its bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import losses_of
from torch import Tensor

import fxprec
from fxprec.integrations import RankStates
from tests.integrations.small import OPTIONS, Loud, batch

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")

STEPS, SAVED = 20, 10


class Training:
    def __init__(self, registered: Callable[[Any], Any], precision: str) -> None:
        torch.compiler.reset()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        self.model = Loud()
        self.model.compile(backend="fxprec", options=OPTIONS)
        optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self.prepared, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.accelerator.register_for_checkpointing(registered(self.model))

    def run(self, start: int, stop: int) -> list[Tensor]:
        losses = losses_of(self.prepared, self.optimizer, map(batch, range(start, stop)), self.accelerator.backward)
        return [*losses, *(p.detach().clone() for p in self.model.parameters())]


@pytest.mark.parametrize(("registered", "precision"), [(fxprec.backend_of, "no"), (RankStates, "bf16")])
def test_training_resumes_bit_for_bit(registered: Callable[[Any], Any], precision: str, tmp_path: Path) -> None:
    first = Training(registered, precision)
    first.run(0, SAVED)
    first.accelerator.save_state(str(tmp_path))
    wanted = first.run(SAVED, STEPS)
    plan = fxprec.backend_of(first.model).plans[0]
    assert plan.promoted
    assert plan.gemms[0].module == "a", "Accelerate's wrapper around forward is no part of a name"

    resumed = Training(registered, precision)
    resumed.accelerator.load_state(str(tmp_path))
    assert fxprec.backend_of(resumed.model).state_dict() != fxprec.Backend().state_dict()
    found = resumed.run(SAVED, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert fxprec.backend_of(resumed.model).plans == (plan,)
    with torch.no_grad():
        assert torch.equal(resumed.prepared(batch(0)), first.prepared(batch(0)))
