"""One backend over several equal layers or models: said, since they share one plan and one scale table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backend_helpers import eager_backend
from torch import Tensor, nn

import fxprec

WORDS = r"linear\.weight: another layer or model runs the same compiled code.*give each a backend of its own"
OPTIONS: dict[str, Any] = {"recipe": "hfp8", "low_ratio": 1.0}


class Layer(nn.Module):
    """(batch, 8) to (batch, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def step(net: nn.Module) -> None:
    net(torch.randn(4, 8)).square().mean().backward()


def compiled_layers(backend: fxprec.Backend) -> nn.Module:
    """Three: the first one's input needs no gradient, which makes its graph another than the others'."""
    net = nn.Sequential(*(Layer() for _ in range(3)))
    for part in net:
        part.compile(backend=backend)
    return net


def test_layers_of_one_backend_are_told_once() -> None:
    backend = eager_backend("simulate", **OPTIONS)
    net = compiled_layers(backend)
    with pytest.warns(fxprec.FxprecWarning, match=WORDS) as caught:
        step(net)
    step(net)
    assert len(caught) == 1
    assert [event.kind for event in backend.events if "another layer" in event.detail] == ["fallback"]


def test_two_models_in_turn_are_told() -> None:
    backend = eager_backend("packed", **OPTIONS)
    first, second = (torch.compile(Layer(), backend=backend) for _ in range(2))
    step(first)
    with pytest.warns(fxprec.FxprecWarning, match=WORDS):
        step(second)


def test_strict_makes_it_an_error_every_time() -> None:
    net = compiled_layers(eager_backend("simulate", strict=True, **OPTIONS))
    for _ in range(2):
        with pytest.raises(fxprec.FallbackError, match=WORDS):
            step(net)


def test_new_parameters_of_the_same_model_are_no_strangers() -> None:
    backend = eager_backend("simulate", **OPTIONS)
    model = Layer()
    compiled = torch.compile(model, backend=backend)
    step(compiled)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    step(compiled)
    assert not any(event.kind == "fallback" for event in backend.events)
    assert len(backend.plans) == 1


def test_layers_with_backends_of_their_own_count_their_own_steps() -> None:
    net = nn.Sequential(*(Layer() for _ in range(3)))
    for part in net:
        part.compile(backend=eager_backend("simulate", **OPTIONS))
    for _ in range(2):
        step(net)
    assert [fxprec.backend_of(part).controllers[0].step for part in net] == [2, 2, 2]
