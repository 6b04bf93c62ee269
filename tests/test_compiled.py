"""A compiled graph is one value, and an attempt that another has to follow says so by its result."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from backend_helpers import eager_backend, mlp

import fxprec
from fxprec.driver.capture import Captured
from fxprec.driver.compilation import Compilation
from fxprec.driver.compiled import Compiled, Retry
from fxprec.driver.wrappers import retained


def trained(capacity: int | None = None) -> tuple[fxprec.Backend, list[Any], list[torch.Tensor]]:
    """Return the backend of one step, the results of its attempts to compile, and the gradients."""
    attempts: list[Any] = []
    take, compile_once = Captured.take, Compilation.compile

    def taken(gm: Any, examples: Sequence[Any]) -> Captured:
        found = take(gm, examples)
        return found if capacity is None else replace(found, capacity=capacity)

    def watched(self: Compilation, examples: Sequence[Any]) -> Compiled | Retry:
        attempts.append(compile_once(self, examples))
        return attempts[-1]

    torch.compiler.reset()
    torch.manual_seed(0)
    model, backend = mlp(), eager_backend("simulate", recipe="hfp8", low_ratio=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captured, "take", taken)
        patch.setattr(Compilation, "compile", watched)
        torch.compile(model, backend=backend)(torch.ones(4, 16)).square().mean().backward()
    return backend, attempts, [p.grad for p in model.parameters() if p.grad is not None]


def test_a_table_too_small_asks_for_one_more_attempt_and_changes_no_number() -> None:
    _, usual, wanted = trained()
    assert [type(found) for found in usual] == [Compiled]
    backend, (first, second), gradients = trained(capacity=1)
    needed = len(second.plan.sites) if second.scales is None else second.scales.num_rows(len(second.plan.sites))
    assert isinstance(first, Retry)
    assert first.capacity > needed > 1
    assert second.capacity == first.capacity == len(backend.controllers[0].table)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_what_the_cache_keeps_of_a_compiled_graph_is_plain_data() -> None:
    _, (compiled,), _ = trained()
    assert compiled.is_training
    assert compiled.plan.sites
    assert compiled.scales is not None
    kept = replace(compiled, run=None, passes=())
    assert pickle.loads(pickle.dumps(kept)) == kept


class Overwriting(torch.autograd.Function):
    """Its backward is a half that writes over what forward saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.detach().clone())
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return retained(lambda args: args[0].mul_(2 * args[1]), (0,))([*ctx.saved_tensors, gradient])


def test_a_half_writes_over_copies_where_another_pass_is_to_come() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = Overwriting.apply(x).sum()
    found = [torch.autograd.grad(loss, x, retain_graph=keep)[0] for keep in (True, True, False)]
    assert all(torch.equal(gradient, 2 * x) for gradient in found)


@pytest.mark.inductor
def test_a_backward_may_keep_the_graph() -> None:
    """Inductor may write over saved tensors, and AOTAutograd refused such a pass where backward was compiled ahead."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    compiled = torch.compile(model, backend="fxprec", options={"recipe": "bf16"})
    loss = compiled(torch.randn(256, 64)).square().mean()
    first, last = (torch.autograd.grad(loss, [*model.parameters()], retain_graph=keep) for keep in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
