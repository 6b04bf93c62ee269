"""``activation_memory_budget``: graphs whose best choice is known, of the shapes that torch's own tests of it have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from helpers import eager_backend
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fxprec
from benchmarks.memory.pairs import loops_left_out

SIDE = 192  # a square of it is one unit of memory, the product of two squares one of arithmetic
Shapes = Sequence[tuple[int, int]]


class Products(nn.Module):
    """Products of parameters, in units of ``SIDE``, put together by a function of (left factors, right factors)."""

    def __init__(self, function: Callable[..., Tensor], left: Shapes, right: Shapes) -> None:
        super().__init__()
        self.function = function
        self.left, self.right = (
            nn.ParameterList(torch.randn(a * SIDE, b * SIDE) for a, b in shapes) for shapes in (left, right)
        )

    def forward(self) -> Tensor:
        return self.function([*self.left], [*self.right])

    def flops_of_backward(self, call: Callable[[], Tensor]) -> int:
        out = call()
        with FlopCounterMode(display=False) as mode:
            out.backward()
        return int(mode.get_total_flops())

    def saved_and_repeated(self, share: float) -> tuple[float, float]:
        """Return what is saved for backward, and the arithmetic of what backward computes again."""
        torch.compiler.reset()
        backend = eager_backend(recipe="bf16")
        with functorch_config.patch(activation_memory_budget=share):
            compiled = torch.compile(self, backend=backend)
            again = self.flops_of_backward(compiled) - self.flops_of_backward(self)
        (plan,) = backend.plans
        assert plan.saved_bytes is not None
        return plan.saved_bytes.planned / (2 * SIDE**2), again / (2 * SIDE**3)


def chain(left: list[Tensor], right: list[Tensor]) -> Tensor:
    x = left[0].cos()
    for w in right:
        x = torch.mm(x, w).cos()
    return x.sum()


def cheap(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return torch.mm(left[0].cos(), right[0]).sum()


def attention(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """(S, D) attends to itself as one head, times (D, D)."""
    x = left[0].reshape(1, 1, *left[0].shape)
    return torch.mm(F.scaled_dot_product_attention(x, x, x).reshape(left[0].shape), right[0]).cos().sum()


def region(x: Tensor) -> Tensor:
    square = torch.mm(x, x.t())
    square = torch.mm(square, square)
    return torch.mm(torch.mm(square, square), x)


def checkpointed(left: list[Tensor], right: list[Tensor]) -> Tensor:
    first = checkpoint(region, left[0] / SIDE, use_reentrant=False)
    return checkpoint(region, first, use_reentrant=False).sum()


def pairs(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return torch.stack([torch.mm(x, w).cos().sum() for x, w in zip(left, right, strict=True)]).sum()


@pytest.mark.parametrize("kept", range(1, 6))
def test_of_an_even_chain_as_many_products_are_kept_as_fit(kept: int) -> None:
    """Five products are kept without a budget. Their cosines, which the next products multiply, are recomputed."""
    assert Products(chain, [(1, 1)], [(1, 1)] * 5).saved_and_repeated(kept / 5) == (kept, 5 - kept)


def test_of_an_even_chain_of_which_nothing_may_be_kept_all_is_repeated_at_once() -> None:
    with pytest.warns(fxprec.errors.FxprecWarning, match="0: 4 bytes wait for backward, .* recomputes much at once"):
        assert Products(chain, [(1, 1)], [(1, 1)] * 5).saved_and_repeated(0) == (0, 5)


@pytest.mark.parametrize(
    ("widths", "kept"),
    [((11, 3, 4, 2), n) for n in (18, 17, 16, 15, 14, 13, 11, 7, 6, 5)]
    + [((3, 5, 11, 17, 14), n) for n in (42, 30, 19, 8, 3)],
)
def test_products_of_one_price_are_kept_until_the_budget_is_full(widths: tuple[int, ...], kept: int) -> None:
    fan = Products(pairs, [(1, 1)] * len(widths), [(1, width) for width in widths])
    assert fan.saved_and_repeated(kept / sum(widths)) == (kept, sum(widths) - kept)


@pytest.mark.parametrize(
    ("right", "most", "kept", "repeated"),
    [
        (((1, 4), (2, 2)), 4, 4, 4),  # of equal bytes, the product that costs less
        (((4, 4), (6, 2), (2, 6)), 28, 28, 2 * 2 * 6),
        (((4, 4), (6, 2), (2, 6)), 16, 12, 2 * 2 * 6 + 4 * 4 * 4),  # 12 of 16 bytes, since those are dearer to repeat
    ],
)
def test_the_dearest_products_are_kept(right: Shapes, most: int, kept: int, repeated: int) -> None:
    whole = sum(a * b for a, b in right)
    model = Products(pairs, [(a, a) for a, _ in right], right)
    assert model.saved_and_repeated(most / whole) == (kept, repeated)


def test_pointwise_arithmetic_is_repeated_and_no_product() -> None:
    assert Products(cheap, [(1, 1)], [(1, 1)]).saved_and_repeated(0.5) == (0, 0)


@pytest.mark.parametrize("count", [3, 8])
def test_of_ten_products_of_one_price_those_are_kept_that_fill_the_budget(count: int) -> None:
    widths = torch.randint(1, 24, (10,), generator=torch.Generator().manual_seed(count)).tolist()
    fan = Products(pairs, [(1, 1)] * len(widths), [(1, width) for width in widths])
    kept = sum(widths[:count])
    assert fan.saved_and_repeated(kept / sum(widths)) == (kept, sum(widths) - kept)


@pytest.mark.parametrize(("tokens", "width", "product"), [(1, 1, True), (1, 3, False), (4, 7, True), (4, 9, False)])
def test_of_attention_and_a_product_the_cheaper_is_repeated(tokens: int, width: int, product: bool) -> None:
    """Attention takes more arithmetic where twice the tokens are more than the width. Its repetition is not counted."""
    model = Products(attention, [(tokens, width)], [(width, width)])
    kept, repeated = model.saved_and_repeated(0.6)
    assert int(kept) == tokens * width, "one of the two results, and with attention's the sums of its rows"
    assert repeated == (tokens * width**2 if product else 0)
    assert (kept > int(kept)) == product


def test_what_a_checkpoint_says_goes_before_the_budget() -> None:
    model = Products(checkpointed, [(1, 4)], [])
    with pytest.warns(fxprec.errors.FxprecWarning, match="no choice was found that saves less; the largest is div"):
        assert model.saved_and_repeated(0.01) == (8, 0), "what the two regions start from"


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("function", "left", "right"),
    [
        (cheap, [(1, 1)], [(1, 1)]),
        (chain, [(1, 1)], [(1, 1)] * 5),
        (pairs, [(1, 1), (2, 2)], [(1, 4), (2, 2)]),
        (attention, [(4, 1)], [(1, 1)]),
    ],
    ids=["cheap", "chain", "pairs", "attention"],
)
def test_all_of_the_peak_is_always_enough(function: Callable[..., Tensor], left: Shapes, right: Shapes) -> None:
    """Compiled graphs held up to 48 % more than was predicted, which no plan within the prediction could make up for."""
    backend = fxprec.Backend(fxprec.Config(recipe="bf16", peak_budget="100%", ways=("recompute",)))
    with loops_left_out():
        torch.compile(Products(function, left, right), backend=backend)().backward()
    peak = backend.plans[0].peak_bytes
    assert peak is not None
    assert peak.compiled == peak.planned <= peak.budget == peak.high


@pytest.mark.inductor
def test_an_even_chain_holds_what_was_planned() -> None:
    """Inductor's fusions crossed products: where its own order was as good as ours, nothing kept it."""
    backend = fxprec.Backend(fxprec.Config(recipe="bf16", peak_budget="100%", ways=("recompute",)))
    with loops_left_out():
        torch.compile(Products(chain, [(1, 1)], [(1, 1)] * 5), backend=backend)().backward()
    assert "replanned" not in [event.kind for event in backend.events]
