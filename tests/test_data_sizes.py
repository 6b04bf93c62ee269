"""Sizes that only the data decides: rows that a mask selects, and sizes read from a tensor. They have no traced value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import eager_backend, gradients
from torch import Tensor, nn

import fxprec


class Body(nn.Module):
    """Two MLPs with ``between`` applied to what the first one returns."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return self.last(self.between(self.first(x), x, number))


def selected(y: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return y[x[:, 0] > number]


def sliced(y: Tensor, x: Tensor, number: Tensor) -> Tensor:
    size = number.item()
    torch._check(size >= 2)
    return y[:size]


def split(y: Tensor, x: Tensor, number: Tensor) -> Tensor:
    first, second = torch.split(y, [(x[:, 0] > 0).sum().item(), (x[:, 0] <= 0).sum().item()])
    return torch.cat([first * 2, second.sin()])


def repeated(y: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return y[:1].expand(number.item(), 16) * 1.0


CASES = [
    (selected, 0, {}),
    (sliced, 200, {}),
    (split, 0, {}),
    (repeated, 40, {}),
    pytest.param(repeated, 40, {"policy": "exact", "low_ratio": 0.5}, id="repeated-exact"),
    pytest.param(selected, 0, {"peak_budget": "100%", "lowering": "inductor"}, id="selected-peak-inductor"),
]


def trained(body: Body, backend: fxprec.Backend | None, numbers: list[Tensor], x: Tensor) -> list[dict[str, Tensor]]:
    torch.compiler.reset()
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    found = []
    with torch._dynamo.config.patch(settings):
        net = body if backend is None else torch.compile(body, backend=backend, fullgraph=True)
        for number in numbers:
            net(x, number).square().mean().backward()
            found.append(gradients(body))
    return found


@pytest.mark.parametrize(("between", "number", "options"), CASES)
def test_gradients_are_those_of_the_uncompiled_model(between, number: int, options: dict[str, object]) -> None:
    """Grouping failed with "Could not extract specialized integer from data-dependent expression u0"."""
    torch.manual_seed(0)
    body, x = Body(between), torch.randn(256, 16)
    numbers = [torch.tensor(number), torch.tensor(number // 2)]
    backend = eager_backend("fp8", **options)
    wanted = trained(body, None, numbers, x)
    for a, b in zip(trained(body, backend, numbers, x), wanted, strict=True):
        for name, gradient in a.items():
            torch.testing.assert_close(gradient, b[name], rtol=0.1, atol=0.1 * float(b[name].abs().max()))
    assert len(backend.plans) == 1
    assert any(site.format == "e4m3fn" for site in backend.plans[0].sites)


def test_a_batch_that_is_marked_unbacked_has_one_plan() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    backend = eager_backend("fp8")
    net = torch.compile(model, backend=backend)
    for rows in (256, 1, 100):
        x = torch.randn(rows, 16)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.testing.assert_close(net(x), model(x), rtol=1e-2, atol=1e-2)
    assert len(backend.plans) == 1


def test_what_bounds_a_size_is_what_a_budget_counts() -> None:
    """At most all 256 rows are selected, so the plan counts 256. ``expand`` to a number has no bound."""
    x, number = torch.randn(256, 16), torch.tensor(40)
    backend = eager_backend("fp8", peak_budget="100%", strict=True)
    trained(Body(selected), backend, [number], x)
    rows = {site.tensor: site.elements for site in backend.plans[0].sites if site.shape.startswith("u")}
    assert set(rows.values()) <= {256 * 16, 256 * 32}
    with pytest.raises(fxprec.FallbackError, match=r"peak_budget counts 8192 for u\d, .* torch\._check"):
        trained(Body(repeated), eager_backend("fp8", peak_budget="100%", strict=True), [number], x)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def test_linear_layers_of_jagged_tensors_save_8_bits() -> None:
    """A jagged tensor's linear layer is one operator for autograd: the transposed weight and the product share a number.

    Backward's nodes were given to the transpose, so what they read was saved in float32.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    model, backend = Padded(), eager_backend("fp8")
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (40, 90, 60)], layout=torch.jagged)
    found = []
    for net in (torch.compile(model, backend=backend), model):
        net(x).values().square().mean().backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=0.1, atol=0.1 * float(found[1][name].abs().max()))
    (plan,) = backend.plans
    assert {site.tensor: site.format for site in plan.sites if site.tensor in ("x._values", "relu")} == {
        "x._values": "e4m3fn",
        "relu": "e4m3fn",
    }
