"""Policy ``exact``: the measured damage against a direct float64 computation, and the plan against ``size``."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import compiled, eager_backend, recorded_works
from in_force import in_force

from fxprec.config import Config, Settings
from fxprec.config.recipes import HFP8
from fxprec.numerics.formats import parse
from fxprec.numerics.reference import reference_quantize
from fxprec.passes.analysis.assignment import assign


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 24), nn.Linear(24, 3))
    return model, torch.randn(16, 12), torch.randint(3, (16,))


@cache
def calibrated():
    """Return the second work: the one that was planned from the calibration step."""
    model, x, y = model_and_batch()
    with recorded_works() as works:
        backend = eager_backend("hfp8", policy="exact", low_ratio=0.5, grad_scaling="none")
        function = compiled(lambda x, y: F.cross_entropy(model(x), y), backend)
        for _ in range(2):
            function(x, y).backward()
    return works[-1], backend.plans[-1]


def damage(x: torch.Tensor, other: torch.Tensor, fmt: str) -> float:
    error = reference_quantize(x.float(), parse(fmt)).double() - x
    product = error * other
    return float(product.sum().abs() + product.square().sum().sqrt())


def test_measured_damage_equals_a_direct_computation_in_float64():
    work, _ = calibrated()
    model, x, y = model_and_batch()
    model = model.double()
    values, value = [], x.double()
    for layer in model:
        value = layer(value)
        value.retain_grad()
        values.append(value)
    F.cross_entropy(value, y).backward()
    wanted: dict[tuple[str, str], float] = {}
    outputs = [t for t in work.grouped.tensors if t.kind == "output" and t.name != "x" and t.id in work.damage]
    for tensor, v in zip(outputs[: len(values)], values, strict=True):
        wanted[tensor.name, "output"] = damage(v.detach(), v.grad, HFP8.lo_forward.name)
        wanted[tensor.name, "grad_output"] = damage(v.grad, v.detach(), HFP8.lo_backward.name)
    for name, p in model.named_parameters():
        wanted[name, "param"] = damage(p.detach(), p.grad, HFP8.lo_forward.name)
    got = {
        (t.name.removeprefix("model."), t.kind): work.damage[t.id] for t in work.grouped.tensors if t.id in work.damage
    }
    for key, number in wanted.items():
        matches = [v for k, v in got.items() if k[1] == key[1] and (k[0] == key[0] or k[0].endswith(key[0]))]
        assert matches, (key, sorted(got))
        assert matches[0] == pytest.approx(number, rel=2e-3, abs=1e-7), key


def predicted(work, low) -> float:
    """Damage of the tensors held low; a parameter's gradient keeps its format."""
    return sum(work.damage.get(t.id, 0.0) for t in work.grouped.tensors if t.id in low and t.kind != "grad_param")


def test_what_keeps_its_format_counts_as_no_damage():
    """A parameter's gradient is measured beside the parameter, and is as wide in a low group as in a high one."""
    work, _ = calibrated()
    assert {t.kind for t in work.grouped.tensors if t.id in work.damage} == {"output", "param", "grad_output"}


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_exact_is_never_worse_than_size_on_its_own_objective(ratio):
    work, _ = calibrated()
    exact, size = (
        assign(work.grouped.tensors, in_force(recipe="hfp8", policy=policy, low_ratio=ratio), damage=work.damage)
        for policy in ("exact", "size")
    )
    assert exact.achieved_ratio >= ratio
    assert predicted(work, exact.low) <= predicted(work, size.low) * (1 + 1e-9)


def test_the_plan_is_the_one_solved_from_the_measurement():
    work, plan = calibrated()
    assert plan.policy == "exact"
    assert plan.gap is not None
    assert plan.gap <= 1e-6
    config = Config(recipe="hfp8", policy="exact", low_ratio=0.5)
    assert plan.low_groups == assign(work.grouped.tensors, Settings.of(config), damage=work.damage).low_groups
