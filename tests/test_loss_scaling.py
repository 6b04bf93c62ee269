"""Loss scaling, which gradient scaling is compared with: a scale of the whole loss, fixed or dynamic."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend, one_rank
from scaled_models import data, grads, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import fxprec
from fxprec import LossScaling
from fxprec.errors import FxprecWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it


def test_baselines_are_one_option_away() -> None:
    """A fixed loss scale of 2**20 gives exactly what multiplying the loss by it and dividing the gradients gives."""
    x, y = data()
    model = mlp()
    function = compiled(
        model, eager_backend("fp16", storage="simulate", grad_scaling=LossScaling(initial=2.0**20, dynamic=False))
    )
    F.mse_loss(function(x), y).mul(1e-6).backward()
    inside = grads(model)
    other = mlp()
    function = compiled(other, eager_backend("fp16", storage="simulate", grad_scaling="none"))
    F.mse_loss(function(x), y).mul(1e-6).mul(2.0**20).backward()
    for a, b in zip(inside, grads(other), strict=True):
        assert torch.equal(a, b * 2.0**-20)
        assert a.abs().max() > 0


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_dynamic_loss_scale_backs_off_skips_and_grows(how: str) -> None:
    model = mlp()
    scaling = LossScaling(initial=2.0**40, growth_interval=3)
    backend = eager_backend("fp16", storage="simulate", grad_scaling=scaling)
    function = compiled(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = optimizer.step if how == "eager" else torch.compile(optimizer.step, backend="eager")
    x, y = data()
    exps, moved = [], []
    for _ in range(40):
        before = copy.deepcopy(list(model.parameters()))
        F.mse_loss(function(x), y).backward()
        step()
        optimizer.zero_grad()
        exps.append(next(r["scale_exponent"] for r in backend.stats() if r["kind"] == "grad_output"))
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    assert exps[0] == 40
    first = moved.index(True)
    assert exps[first] == 40 - first, "halved at each overflow"
    assert not any(moved[:first])
    assert backend.skipped_steps == moved.count(False)
    assert exps[first : first + 4] == [exps[first]] * 3 + [exps[first] + 1], "doubled after three good steps"
    changes = [b - a for a, b in zip(exps[first:], exps[first + 1 :], strict=False)]
    assert set(changes) == {-1, 0, 1}
    for i, change in enumerate(changes):
        assert (change == -1) == (not moved[first + i]), "skipped where it overflowed, and there alone"


def test_an_overflow_of_any_backward_pass_skips_the_step_of_all() -> None:
    model = mlp()
    scaling = LossScaling(initial=2.0**10, growth_interval=1000)
    backend = eager_backend("fp16", storage="simulate", grad_scaling=scaling)
    function = compiled(model, backend)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model if isinstance(layer, nn.Linear)]
    x, y = data()
    for step, loss_factor in enumerate((1, 1e8, 1)):
        before = copy.deepcopy(list(model.parameters()))
        F.mse_loss(function(x), y).mul(loss_factor).backward()
        F.mse_loss(function(x), y).mul(1e-3).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert any(moved) == (step != 1)
        assert all(p.isfinite().all() for p in model.parameters())
    assert backend.skipped_steps == len(optimizers)


def test_an_overflow_is_told_where_the_optimizer_steps_shards() -> None:
    """FSDP2 gives graphs gathered parameters, and the optimizer its shards: the two have no tensor in common."""
    model = mlp()
    backend = eager_backend("fp16", storage="simulate", grad_scaling=LossScaling(initial=2.0**40))
    function = compiled(model, backend)
    x, y = data()
    F.mse_loss(function(x), y).backward()
    with one_rank():
        shard = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,))))
        shard.grad = torch.ones_like(shard)
        with pytest.warns(FxprecWarning, match="step is not skipped: it steps shards .* take grad_scaling='auto'"):
            torch.optim.SGD([shard], 0.1).step()
    F.mse_loss(function(x), y).mul(1e-12).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert backend.skipped_steps == 1, "another model's optimizer stepped in between, and this one's had not"


def test_a_step_that_may_not_break_is_told_why_it_does() -> None:
    model = mlp()
    function = compiled(model, eager_backend("fp16", storage="simulate", grad_scaling="dynamic"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    function(data()[0]).sum().backward()
    with pytest.raises(torch._dynamo.exc.Unsupported, match='grad_scaling="dynamic" reads what the gradients are'):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()


def test_options_of_loss_scaling_are_checked() -> None:
    for options, words in (
        ({"initial": 1000.0}, "grad_scaling.initial is 1000.0; it must be a power of two from 2**-60 to 2**60"),
        ({"growth": 0.5}, "growth is 0.5; it must be a power of two from 2"),
        ({"backoff": 2.0}, "backoff is 2.0; it must be a power of two"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"dynamic": 1}, "dynamic"),
    ):
        with pytest.raises(fxprec.ConfigError) as error:
            LossScaling(**options)
        assert words in str(error.value)
