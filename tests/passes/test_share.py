"""``activation_memory_budget``: graphs whose best choice is known, of the shapes that torch's own tests of it have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch._functorch.config as functorch_config
from helpers import eager_backend
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

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


def pairs(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return torch.stack([torch.mm(x, w).cos().sum() for x, w in zip(left, right, strict=True)]).sum()


@pytest.mark.parametrize("ninths", range(10))
def test_of_an_even_chain_as_many_products_are_kept_as_fit(ninths: int) -> None:
    """Nine values are kept without a budget: five products, and the cosines of four of them, multiplied next."""
    repeated = max(5 - ninths, 0)
    assert Products(chain, [(1, 1)], [(1, 1)] * 5).saved_and_repeated(ninths / 9) == (ninths, repeated)


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
