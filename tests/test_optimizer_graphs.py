"""An optimizer's step that goes through this backend too: compiled as it is, whatever the recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from backend_helpers import mlp
from torch import Tensor, nn

from fxprec import Backend, Config

MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
}
Train = Callable[[Tensor], None]


def with_step(model: nn.Module, forward: nn.Module, step: Callable[[], object]) -> Train:
    def train(x: Tensor) -> None:
        model.zero_grad()
        forward(x).square().mean().backward()
        step()

    return train


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return step


def backend(storage: str) -> Backend:
    return Backend(Config(recipe="hfp8", storage=storage, lowering="eager", low_ratio=1.0, promote_above=None))


@pytest.mark.parametrize(("name", "storage"), [("adamw", "simulate"), ("sgd", "packed")])
def test_a_compiled_optimizer_steps_as_an_uncompiled_one(name: str, storage: str) -> None:
    """Rounded to 1-4-3, AdamW's second moment was 0 at the second step, and the weights NaN."""
    model = mlp()
    plain, own = backend(storage), backend(storage)
    runs = []
    for compiles, used in ((False, plain), (True, own)):
        trained = copy.deepcopy(model)
        optimizer = MAKE[name](trained)
        step = clipped(trained, optimizer)
        torch.compiler.reset()
        forward = torch.compile(trained, backend=used)
        runs.append(with_step(trained, forward, torch.compile(step, backend=used) if compiles else step))
        for i in range(3):
            runs[-1](torch.randn(8, 16, generator=torch.Generator().manual_seed(i)))
        runs[-1] = list(trained.parameters())
    for wanted, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)  # hfp8 is off by 1e-3
    assert len(own.plans) == len(plain.plans) == 1
    (said,) = {e.detail for e in own.events if e.kind == "unplanned"}  # of clipping and of the step
    assert "nothing is rounded" in said


def test_a_training_step_compiled_as_a_whole() -> None:
    """AdamW's first step moves each weight that has a gradient by the learning rate."""
    model, used = mlp(), backend("simulate")
    before = copy.deepcopy(model)
    train = torch.compile(with_step(model, model, MAKE["adamw"](model).step), backend=used)
    train(torch.randn(8, 16))
    for p, old in zip(model.parameters(), before.parameters(), strict=True):
        assert p.grad is not None
        moved = p.grad.abs() > 1e-4  # where eps, 1e-8, is nothing beside it
        torch.testing.assert_close(p[moved], (old * (1 - 1e-4) - 1e-2 * p.grad.sign())[moved], rtol=0, atol=2e-6)
    assert [e.kind for e in used.events if e.kind not in ("uncompiled", "scale")] == ["unplanned"]
    train(torch.randn(8, 16))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_models_own_buffers_and_inputs_are_no_weights() -> None:
    """Evaluation that writes over a buffer, or in place over its input beside a GEMM, is rounded as training is."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.seen += y.detach().mean(0)
            return x.mul_(2.0) + y

    used = backend("simulate")
    model = Net()
    with torch.no_grad():
        found = torch.compile(model, backend=used)(torch.ones(4, 16))
        wanted = model(torch.ones(4, 16))
    assert not torch.equal(found, wanted)
    assert not used.events
    assert used.all_plans[0] is not None
