"""Random programs under every storage: they compile, give finite gradients, and stay close to float32."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from helpers import assert_bits_equal, compiled, eager_backend, gradients
from test_casts_simulated import Program, seed_gradient

from fxprec.config import Settings
from fxprec.config.recipes import Recipe, find_recipe

FEW = settings(max_examples=4, deadline=None, derandomize=True, database=None)
CASES = [("hfp8", "simulate"), ("hfp8", "packed"), ("fp8", "native")]
SEEDS = st.integers(100, 10_000)


def step(function, model: Program) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    out = function(torch.randn(4, 6))
    out.backward(seed_gradient(out))
    return out.detach(), gradients(model)


def program(seed: int) -> Program:
    torch.manual_seed(seed)
    return Program(seed, length=8)


def compiled_step(model: Program, recipe, **options):
    return step(compiled(model, eager_backend(recipe, promote_above=None, **options)), model)


@pytest.mark.parametrize(("recipe", "storage"), CASES)
@FEW
@given(seed=SEEDS)
def test_all_low_gradients_are_finite_and_complete(recipe, storage, seed):
    model = program(seed)
    _, wanted = step(model, model)
    out, got = compiled_step(model, recipe, storage=storage, low_ratio=1.0)
    assert out.isfinite().all()
    assert got.keys() == wanted.keys()
    assert all(g.isfinite().all() and g.shape == wanted[name].shape for name, g in got.items())


@pytest.mark.parametrize(("recipe", "storage"), CASES)
@FEW
@given(seed=SEEDS)
def test_all_high_gradients_are_as_close_as_the_format(recipe, storage, seed):
    """To first order each of n operators adds one unit of relative error, forward and backward."""
    model = program(seed)
    reference, wanted = step(model, model)
    unit = 2.0 ** -(find_recipe(recipe).hi.mantissa_bits + 1)
    out, got = compiled_step(model, recipe, storage=storage, low_ratio=0.0)
    bound = 2 * (len(model.code) + 2) * unit
    scale = max(float(g.norm()) for g in wanted.values())
    assert float((out - reference).norm()) <= bound * float(reference.norm()) + 1e-6
    for name, grad in got.items():
        assert float((grad - wanted[name]).norm()) <= bound * scale, name


@FEW
@given(seed=SEEDS)
def test_identity_formats_change_no_bit(seed):
    """Rounding to float32 is the identity: all that is left is what the passes did to the graph."""
    model = program(seed)
    identity = Recipe(name="identity", hi="fp32", lo_forward="fp32", lo_backward="fp32")
    torch._dynamo.reset()
    plain, wanted = step(torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True), model)
    with mock.patch.object(Settings, "rounds_anything", True):
        out, got = compiled_step(model, identity, storage="simulate")
    assert_bits_equal(out, plain, "result")
    for name, grad in got.items():
        assert_bits_equal(grad, wanted[name], name)
