"""The relative error of a like-signed polynomial is at most that of its highest power; differences are none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec.passes.analysis.like_signed import LikeSigned, like_signed

X = torch.cat([torch.linspace(-8, 8, 101), torch.tensor([1e-3, -1e-3, 300.0])]).double()
X = X[X != 0]


def result_of(function: Callable[[Tensor], Tensor]) -> tuple[LikeSigned | None, Node]:
    graph = make_fx(function)(X).graph
    (x,) = graph.find_nodes(op="placeholder")
    (result,) = next(iter(reversed(graph.nodes))).all_input_nodes
    return like_signed(result, lambda n: n is x), x


@st.composite
def functions(draw: st.DrawFn, depth: int = 3) -> Callable[[Tensor], Tensor]:
    kind = draw(st.sampled_from(["x", "scaled", "power", "sum", "difference", "product", "shifted", "negated"]))
    if kind == "x" or depth == 0:
        return lambda x: x
    a, number = draw(functions(depth=depth - 1)), draw(st.sampled_from([-2.0, -0.5, 0.25, 3.0]))
    if kind in ("sum", "difference", "product"):
        b = draw(functions(depth=depth - 1))
        return {
            "sum": lambda x: a(x) + b(x),
            "difference": lambda x: a(x) - b(x),
            "product": lambda x: a(x) * b(x),
        }[kind]
    return {
        "scaled": lambda x: a(x) * number,
        "power": lambda x: a(x) ** (2 if number > 0 else 3),
        "shifted": lambda x: a(x) + number,
        "negated": lambda x: -a(x),
    }[kind]


@given(function=functions(), error=st.floats(-0.0625, 0.0625))
def test_the_relative_error_is_at_most_that_of_the_highest_power(function, error: float):
    found, x = result_of(function)
    if found is None:
        return
    assert found.source is x
    assert 1 <= found.degree <= 3
    exact, moved = function(X), function(X * (1 + error))
    most = (1 + abs(error)) ** found.degree - 1 + 1e-13
    assert bool(((moved - exact).abs() <= most * exact.abs()).all())
    assert bool(((exact < 0) == ((X < 0) & found.is_odd) ^ found.is_negative).all())


@pytest.mark.parametrize(
    ("function", "degree"),
    [
        (lambda x: math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)), 3),
        (lambda x: x * 0.7978845608 * (1 + 0.044715 * x * x), 3),
        (lambda x: 1.702 * x, 1),
        (lambda x: x / math.sqrt(2), 1),
        (lambda x: -x - 0.1 * x**3, 3),
        (lambda x: (x.float() * 2).double(), 1),
    ],
    ids=["gelu", "fast gelu", "quick gelu", "erf gelu", "negative", "cast"],
)
def test_arguments_of_activations_are_like_signed(function, degree: int):
    found, _ = result_of(function)
    assert found is not None
    assert found.degree == degree
    assert len(found.nodes) == len(set(found.nodes))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - 0.1 * x**3,
        lambda x: x + x**2,
        lambda x: x + 1,
        lambda x: x**2 - 1,
        lambda x: x**4,
        lambda x: x**0.5,
        lambda x: 1 / x,
        lambda x: x * 0.0,
        lambda x: x * float("inf"),
        lambda x: torch.add(x, x, alpha=-0.5),
        lambda x: x + torch.ones(len(X), dtype=X.dtype),
        lambda x: torch.exp(x) * 2,
    ],
    ids=list("abcdefghijkl"),
)
def test_what_may_cancel_or_is_no_cubic_is_not(function):
    found, _ = result_of(function)
    assert found is None


def test_of_two_sources_it_is_not():
    graph = make_fx(lambda x, y: x + 2 * y)(X, X.clone()).graph
    (result,) = next(iter(reversed(graph.nodes))).all_input_nodes
    assert like_signed(result, lambda n: n.op == "placeholder") is None


def test_a_long_chain_is_not_searched_to_its_end():
    """A chain of n sums that read their operand twice has 2^n paths; what is deeper than 8 operators is a source."""

    def doubled(x: Tensor) -> Tensor:
        for _ in range(200):
            x = x + x
        return x

    graph = make_fx(doubled)(X).graph
    (result,) = next(iter(reversed(graph.nodes))).all_input_nodes
    assert like_signed(result, lambda n: n.op == "placeholder") is None
    found = like_signed(result, lambda n: True)
    assert found is not None
    assert len(found.nodes) == 8


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, torch.erf], ids=["tanh", "sigmoid", "erf"])
def test_a_saturating_function_and_its_slope_move_by_less_than_the_error_of_its_argument(function):
    u = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(function(u).sum(), u, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), u)
    assert float((u * slope).detach().abs().max()) < 0.5
    assert float((u * curvature).detach().abs().max()) < 1
