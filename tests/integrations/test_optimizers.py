"""Optimizers of others over gradients that fxprec's code makes: 20 steps, save, resume bit for bit."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import losses_of
from torch import Tensor

import fxprec
from tests.integrations.small import OPTIONS, Loud, batch

STEPS, SAVED = 20, 10


def adamw(**how: Any) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.AdamW(parameters, 1e-3, **how)


def from_package(module: str, name: str, **how: Any) -> Callable[[Any], Any]:
    def make(parameters: Any) -> Any:
        package = module.partition(".")[0]
        pytest.importorskip(package, reason=f"{package} is not installed")
        return getattr(importlib.import_module(module), name)(parameters, lr=1e-3, **how)

    return make


OPTIMIZERS = {
    "loop": adamw(foreach=False),
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "schedule-free": from_package("schedulefree", "AdamWScheduleFree"),
    "torchao 8-bit": from_package("torchao.optim", "AdamW8bit", block_size=16),
    "bitsandbytes 8-bit": from_package("bitsandbytes.optim", "AdamW8bit", min_8bit_size=16),
}


class Training:
    def __init__(self, make: Callable[[Any], Any]) -> None:
        torch.compiler.reset()
        self.model = Loud()
        self.model.compile(backend="fxprec", options=OPTIONS)
        self.optimizer = make(self.model.parameters())
        if hasattr(self.optimizer, "train"):  # schedule-free
            self.optimizer.train()

    def run(self, start: int, stop: int) -> list[Tensor]:
        losses = losses_of(self.model, self.optimizer, (batch(step % 3) for step in range(start, stop)))
        return [*losses, *(p.detach().clone() for p in self.model.parameters())]

    def state(self) -> tuple[Any, Any, Any]:
        backend = fxprec.backend_of(self.model)
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), backend.state_dict()))


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n == "loop" else ()) for n in OPTIMIZERS])
def test_training_falls_and_resumes_bit_for_bit(name: str) -> None:
    first = Training(OPTIMIZERS[name])
    before = first.run(0, SAVED)
    state = first.state()
    wanted = first.run(SAVED, STEPS)
    assert wanted[2] < before[0]

    second = Training(OPTIMIZERS[name])
    for part, saved in zip((second.model, second.optimizer, fxprec.backend_of(second.model)), state, strict=True):
        part.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(second.run(SAVED, STEPS), wanted, strict=True))
