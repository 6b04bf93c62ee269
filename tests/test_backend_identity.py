"""recipe="fp32" is plain Inductor, bit for bit, where neither a budget nor an optimizer is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_helpers import Cnn
from torch import Tensor, nn

import fxprec
from fxprec.demo.models import CharTransformer


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "cnn": (Cnn, lambda: torch.rand(4, 3, 8, 8)),
    "transformer": (
        lambda: CharTransformer(vocab=31, context=16, layers=1, width=16, heads=2),
        lambda: torch.randint(0, 31, (2, 16)),
    ),
    "dropout": (with_dropout, lambda: torch.randn(32, 16)),
}


def outputs_and_gradients(model: nn.Module, x: Tensor, **options: object) -> list[Tensor]:
    torch.compiler.reset()
    compiled = torch.compile(model, **options)  # type: ignore[call-overload]
    torch.manual_seed(11)  # dropout's
    out = compiled(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.inductor
@pytest.mark.parametrize("name", MODELS)
def test_fp32_is_bit_identical_to_inductor(name: str) -> None:
    make, batch = MODELS[name]
    model, x = make(), batch()
    twin = copy.deepcopy(model)
    found = outputs_and_gradients(model, x, backend="fxprec", options={"recipe": "fp32"})
    wanted = outputs_and_gradients(twin, x, backend="inductor")
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a is not None, i
        assert torch.equal(a, b), f"tensor {i} of {len(wanted)}"


@pytest.mark.inductor
def test_a_ratio_of_0_with_hi_fp32_changes_nothing() -> None:
    recipe = fxprec.Recipe(hi="fp32", lo_forward="e4m3fn", lo_backward="e5m2")
    x = torch.randn(32, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    twin = copy.deepcopy(model)
    options = {"recipe": recipe, "low_ratio": 0.0}
    found = outputs_and_gradients(model, x, backend="fxprec", options=options)
    for a, b in zip(found, outputs_and_gradients(twin, x, backend="inductor"), strict=True):
        assert torch.equal(a, b)


def test_recipe_fp32_under_a_peak_budget_recomputes_and_has_the_same_bits(tmp_path: Path) -> None:
    make, batch = MODELS["cnn"]
    model, x = make(), batch()
    options: dict[str, Any] = {"recipe": "fp32", "lowering": "eager", "strict": True}
    plain = fxprec.Backend(fxprec.Config(**options))
    saving, budgeted = (fxprec.Backend(fxprec.Config(**options, peak_budget=share)) for share in ("100%", "90%"))
    wanted = outputs_and_gradients(copy.deepcopy(model), x, backend=plain)
    found = outputs_and_gradients(copy.deepcopy(model), x, backend=budgeted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    (plan,) = budgeted.plans
    outputs_and_gradients(copy.deepcopy(model), x, backend=saving)
    assert plan.saved_bytes.planned < saving.plans[0].saved_bytes.planned
    assert plan.peak_bytes is not None
    assert plan.peak_bytes.planned <= plan.peak_bytes.budget < plan.peak_bytes.high
    plan.save(tmp_path / "plan.json")
    followed = fxprec.Backend(fxprec.Config(**options, plan=tmp_path / "plan.json"))
    outputs_and_gradients(copy.deepcopy(model), x, backend=followed)
    assert followed.plans[0].saved_bytes == plan.saved_bytes


@pytest.mark.inductor
def test_recipe_fp32_steps_parameters_in_backward() -> None:
    """A step of the optimizer where backward makes gradients is one that the recipe does not decide."""
    model, x = with_dropout(), torch.randn(32, 16)
    twin = copy.deepcopy(model)
    weights = []
    for trained, is_given in ((model, True), (twin, False)):
        optimizer = fxprec.optim.SGD(trained.parameters(), lr=0.1, update="nearest")
        backend = fxprec.Backend(fxprec.Config(recipe="fp32"), optimizer=optimizer if is_given else None)
        torch.compiler.reset()
        torch.manual_seed(11)
        torch.compile(trained, backend=backend)(x).square().sum().backward()
        moved = [p.detach().clone() for p in trained.parameters()]
        optimizer.step()
        weights.append([p.detach() for p in trained.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(moved, weights[-1], strict=True)) == is_given
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.core
@pytest.mark.inductor
@pytest.mark.parametrize("storage", ["packed", "simulate"])
def test_the_default_lowering_agrees_with_the_eager_reference(storage: str) -> None:
    """GEMMs are the same library calls; only pointwise code and sums differ, in the last float32 bits."""
    results = []
    x = torch.randn(32, 16)
    for lowering in ("auto", "eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        options = {"recipe": "hfp8", "storage": storage, "low_ratio": 1.0, "lowering": lowering}
        results.append(outputs_and_gradients(model, x, backend="fxprec", options=options))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.inductor
def test_the_default_lowering_of_a_cnn_agrees_with_the_eager_reference() -> None:
    """Channels-last and rounding in place: what is stored in 16 bits differs by a step of 2**-10 where a sum rounds."""
    results, x = [], torch.rand(4, 3, 8, 8)
    for lowering in ("auto", "eager"):
        torch.manual_seed(0)
        model = Cnn()
        before = copy.deepcopy([*model.parameters()])
        recipe = fxprec.Recipe(hi="1-7-8", lo_forward="1-6-9", lo_backward="1-6-9")
        options = {"recipe": recipe, "storage": "packed", "low_ratio": 1.0, "lowering": lowering}
        results.append(outputs_and_gradients(model, x, backend="fxprec", options=options))
        for old, new in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, new), "parameters are read, never rounded in place"
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert (a - b).double().norm() <= 0.02 * b.double().norm() + 1e-6, i
