"""Op by op, results and what backward keeps may be views of what was given, which may be views themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_helpers import assert_close, eager_backend
from torch import Tensor

Step = Callable[..., tuple[Tensor, Tensor]]


def with_a_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A view of the input, and a result whose backward does not read the input's memory."""
    return x[1:].mT, x.sum() + w @ w


def with_rows(x: Tensor, w: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Backward reads ``rows`` as they were given: whole numbers are not rounded."""
    return rows, (x @ w)[rows]


def compiled(function: Step) -> Step:
    step: Step = torch.compile(function, backend=eager_backend("packed"), fullgraph=True)
    return step


def piece() -> tuple[Tensor, Any, Tensor]:
    """A leaf, some rows of what is made of it, and a weight."""
    torch.manual_seed(0)
    leaf, w = torch.randn(6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    return leaf, (leaf * 1.0)[1:5], w


def written(function: Step) -> list[Tensor | None]:
    """Write into the view of the input; return what there is to see of it."""
    leaf, x, w = piece()
    view, result = function(x, w)
    assert view._base is x._base
    view.mul_(2.0)
    (x._base.square().sum() + view.sum() + result.sum()).backward()
    return [view.detach(), x._base.detach(), result.detach(), leaf.grad, w.grad]


def test_a_write_into_a_view_of_an_input_that_is_a_view_does_what_it_does_uncompiled() -> None:
    for i, (a, b) in enumerate(zip(written(compiled(with_a_view)), written(with_a_view), strict=True)):
        assert_close(a, b, f"tensor {i}")


@pytest.mark.parametrize("is_piece", [False, True], ids=["whole", "piece"])
@pytest.mark.parametrize("make", [lambda function: function, compiled], ids=["uncompiled", "compiled"])
def test_a_write_into_what_backward_reads_is_an_error(make: Callable[[Step], Step], is_piece: bool) -> None:
    _, x, w = piece()
    whole = torch.tensor([1, 3, 0, 2, 1])
    rows = whole[1:4] if is_piece else whole
    _, result = make(with_rows)(x, w, rows)
    rows.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
