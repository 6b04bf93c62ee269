"""``module.compile()`` of torch's own classes, whose code Dynamo compiles only as part of a caller."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import eager_backend, gradients
from torch import nn

import fxprec

OPTIONS = {"recipe": "fp8", "lowering": "eager", "strict": True}


class Named(nn.Sequential):
    """A class of the user's that has torch's ``forward``."""


MAKERS = {
    "layer": lambda: nn.Linear(16, 16),
    "container": lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
    "inherited": lambda: Named(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
    ),
}


@pytest.mark.parametrize(
    ("make", "by_name"),
    [*((make, True) for make in MAKERS.values()), (MAKERS["layer"], False)],
    ids=[*MAKERS, "layer, an instance"],
)
def test_a_module_of_torchs_own_class_is_compiled_in_place(make, by_name: bool) -> None:
    """Nothing was compiled before torch 2.14, and nothing said so."""
    model = make()
    reference, x, weights = copy.deepcopy(model), torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    model.compile(**({"backend": "fxprec", "options": OPTIONS} if by_name else {"backend": eager_backend("fp8")}))
    for net in (model, reference):
        (net(x) * weights).sum().backward()
    wanted = gradients(reference)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0.1, atol=0.1 * float(wanted[name].abs().max()))
    (plan,) = fxprec.backend_of(model).plans
    assert any(site.format == "e4m3fn" for site in plan.sites)
    assert model.state_dict().keys() == reference.state_dict().keys()


def test_many_layers_in_place_have_a_plan_each() -> None:
    """They share the code of one frame, and Dynamo's recompile limit is 8."""
    layers = [nn.Linear(16, 16 + n) for n in range(10)]
    for layer in layers:
        layer.compile(backend="fxprec", options=OPTIONS)
        layer(torch.randn(4, 16)).sum().backward()
    assert [len(fxprec.backend_of(layer).plans) for layer in layers] == [1] * 10
