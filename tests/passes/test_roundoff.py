"""By how much recomputations enlarge the rounding errors of the copies that they start from."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxprec.passes.crossings.roundoff import amplification


def of(function: Callable[..., Tensor], *inputs: Tensor) -> float:
    """The amplification of a function whose sources are its inputs."""
    graph = make_fx(function)(*inputs).graph
    (result,) = next(iter(reversed(graph.nodes))).all_input_nodes
    return amplification(result, lambda n: n.op == "placeholder", lambda n: n)


X, Y = torch.ones(64, 64), torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("function", "least", "most"),
    [
        (lambda x, y: 3 * x, 0.999, 1.001),
        (lambda x, y: (x.bfloat16() * 2).float(), 0.999, 1.001),
        (lambda x, y: x * y, 1.3, 1.5),
        (lambda x, y: x.square(), 1.9, 2.1),
        (lambda x, y: x**3, 2.8, 3.2),
        (lambda x, y: x + y, 0.9, 1.1),
        (lambda x, y: F.gelu(x), 1.0, 1.5),
        (lambda x, y: F.silu(x) * y, 1.3, 1.7),
        (lambda x, y: F.silu(x[:, :32]) * x[:, 32:], 1.3, 1.7),
        (lambda x, y: F.silu(x[:, :32]) * x[:, :32].clone(), 1.8, 2.5),
        (lambda x, y: x - torch.tanh(x), 2.5, 3.5),
        (lambda x, y: x.exp(), 4.0, 20.0),
        (lambda x, y: x - 0.99 * x, 0.999, 1.001),
        (lambda x, y: x * y - x * (y + 0.01 * x), 1.5, math.inf),
        (lambda x, y: torch.full_like(x, 2.0) * x, 0.999, 1.001),
    ],
    ids=[
        "multiple",
        "cast",
        "product",
        "square",
        "cube",
        "sum",
        "gelu",
        "gated",
        "parts of one tensor",
        "the same part twice",
        "difference that cancels",
        "exponential",
        "difference of multiples",
        "difference of products",
        "constant",
    ],
)
def test_the_amplification_is_that_of_the_chain(function, least: float, most: float) -> None:
    assert least < of(function, X, Y) < most


@pytest.mark.parametrize(
    "function", [lambda x, y: x @ y, lambda x, y: x.sum(1), lambda x, y: x.cumsum(0)], ids=["product", "sum", "scan"]
)
def test_what_is_not_elementwise_is_not_estimated(function) -> None:
    assert of(function, X, Y) == math.inf


def test_a_norm_of_a_stored_tensor_amplifies_nothing() -> None:
    """Mean and deviation are statistics: they are not rounded, and are near 1 here."""
    assert of(lambda x, mean, weight: (x - mean) * weight, X, torch.ones(64, 1), torch.ones(64)) < 1.1


def test_the_same_chain_has_the_same_amplification_each_time() -> None:
    assert of(lambda x, y: F.gelu(x) * y, X, Y) == of(lambda x, y: F.gelu(x) * y, X, Y)


def test_a_chain_of_a_thousand_operators_is_not_estimated() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(1_500):
            x = x * 1.001
        return x

    assert of(chain, X) == math.inf


def test_nothing_is_drawn_from_torchs_generator() -> None:
    graph = make_fx(lambda x: x * torch.rand_like(x) + torch.dropout(x, 0.5, True))(X).graph
    (result,) = next(iter(reversed(graph.nodes))).all_input_nodes
    state = torch.get_rng_state()
    assert amplification(result, lambda n: n.op == "placeholder", lambda n: n) < math.inf
    assert torch.equal(torch.get_rng_state(), state)


def test_an_operator_of_the_users_own_is_not_called() -> None:
    called: list[int] = []

    def counted(x: Tensor) -> Tensor:
        called.append(1)
        return x + 1

    name = "fxprec_test::counted"
    with torch.library._scoped_library("fxprec_test", "DEF") as library:
        library.define("counted(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
        library.impl("counted", counted, "CPU")
        torch.library.register_fake(name, torch.empty_like, lib=library)
        graph = make_fx(lambda x: 2 * torch.ops.fxprec_test.counted(x), tracing_mode="fake")(X).graph
        called.clear()
        (result,) = next(iter(reversed(graph.nodes))).all_input_nodes
        assert amplification(result, lambda n: n.op == "placeholder", lambda n: n) == 0, "its result is not rounded"
    assert not called
