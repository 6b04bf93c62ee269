"""Where backward's updates are placed: behind the loops that read the parameter, up to what lies in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec.passes.apply_updates import _made_in_loops


def _stream(x: Tensor, weight: Tensor, later: Tensor, *, whole: bool) -> tuple[Tensor, Tensor]:
    """A residual stream's gradient, which a norm's weight is a factor of, before and behind the norm below."""
    stream = x * weight
    product = (stream.view(4, 4) if whole else stream.sin()) @ later
    return (stream * later).cos(), product


@pytest.mark.parametrize(("whole", "wanted"), [(True, ["mul"]), (False, ["mul", "sin", "mul_1", "cos"])])
def test_an_update_comes_behind_loops_up_to_a_value_that_a_gemm_reads(whole: bool, wanted: list[str]) -> None:
    """What a GEMM reads is in memory: behind it the parameter is not read again."""
    run: Callable[..., object] = lambda *xs: _stream(*xs, whole=whole)  # noqa: E731
    graph = make_fx(run, tracing_mode="fake")(*(torch.ones(4, 4) for _ in range(3))).graph
    (first,) = (node for node in graph.nodes if node.name == "mul")
    found = {node.name for node in _made_in_loops([first])}
    assert found == set(wanted)
