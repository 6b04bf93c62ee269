"""Mixtures of experts of transformers: planned in one graph, with gradients of float64 and autocast's loss."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks.fidelity.experts import MODELS, train

pytestmark = pytest.mark.filterwarnings("ignore")
MOST = {"bf16": 0.008, "fp8": 0.05, "mxfp8": 0.15, "nvfp4": 0.5}
"""Of the gradients of the first step: bf16 as autocast's, 8 bits and blocks twice what was measured."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", MOST)
def test_experts_are_gemms_whose_gradients_are_float64s(name: str, side: str) -> None:
    run = train(name, side, 1)
    assert (run.graphs, run.grouped) == (1, 4), "two layers, each with two grouped products"
    assert run.gradient_error < MOST[side]


@pytest.mark.parametrize("name", MODELS)
def test_a_short_training_loses_as_autocasts_does(name: str) -> None:
    wanted, found = train(name, "autocast", 40), train(name, "fp8", 40)
    assert found.last_loss < wanted.last_loss + 0.15
    assert wanted.last_loss < 0.6 * wanted.first_loss
