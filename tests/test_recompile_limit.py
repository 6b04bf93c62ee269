"""Dynamo's recompile limits: many equal models all compile, and what runs uncompiled is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from backend_helpers import FINE, assert_close
from torch import Tensor, nn

import fxprec

OPTIONS: dict[str, Any] = {"recipe": FINE, "low_ratio": 1.0, "lowering": "eager", "storage": "simulate"}
limits = torch._dynamo.config.patch


class Block(nn.Module):
    """(batch, 8) to (batch, 8); a Python number it is called with is a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, flags: str = "") -> Tensor:
        return torch.tanh(self.linear(x)) * (1 + len(flags))


def compile_by_name(block: nn.Module, **options: Any) -> None:
    block.compile(backend="fxprec", options={**OPTIONS, **options})


def compile_by_instance(block: nn.Module) -> None:
    block.compile(backend=fxprec.Backend(fxprec.Config(**OPTIONS)))


@pytest.mark.parametrize(
    ("count", "compile_block", "limit"),
    [(12, compile_by_name, {}), (6, compile_by_instance, {"recompile_limit": 2, "accumulated_recompile_limit": 4})],
)
def test_more_blocks_than_the_limit_all_compile_and_agree(count: int, compile_block: Any, limit: dict) -> None:
    net = nn.Sequential(*(Block() for _ in range(count)))
    reference = copy.deepcopy(net)
    for block in net:
        compile_block(block)
    x = torch.randn(4, 8)
    with limits(**limit):
        found, wanted = net(x), reference(x)
        found.square().sum().backward()
    wanted.square().sum().backward()
    assert_close(found, wanted, "output")
    for (name, p), q in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, name)
    backends = [fxprec.backend_of(block) for block in net]
    assert len(set(map(id, backends))) == count
    assert [len(backend.plans) for backend in backends] == [1] * count
    assert [controller.step for backend in backends for controller in backend.controllers] == [1] * count
    assert not any(backend.events for backend in backends)


def call_with(block: nn.Module, x: Tensor, *flags: str) -> None:
    for flag in flags:
        block(x, flag)


@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_a_limit_that_the_model_itself_hits_is_said_once(limit: str) -> None:
    block, x = Block(), torch.randn(4, 8)
    compile_by_name(block)
    words = rf"forward \(.*test_recompile_limit.py:\d+\): runs uncompiled.*this model hit .*config\.{limit} \(2\)"
    with limits(**{limit: 2}):
        call_with(block, x, "", "a")
        with pytest.warns(fxprec.FxprecWarning, match=words) as caught:
            call_with(block, x, "aa", "aaa")
    assert len(caught) == 1
    backend = fxprec.backend_of(block)
    assert [event.kind for event in backend.events] == ["fallback"]
    assert len(backend.plans) == 2
    assert copy.deepcopy(backend).events == (), "a copy tells for itself"


def test_a_model_that_hit_a_limit_keeps_no_other_from_being_compiled() -> None:
    """Dynamo marked the code itself: a new model of the class ran uncompiled, without a word and under ``strict`` too."""
    first, second, x = Block(), Block(), torch.randn(4, 8)
    compile_by_name(first)
    compile_by_name(second, strict=True)
    with limits(recompile_limit=1):
        with pytest.warns(fxprec.FxprecWarning, match="this model hit"):
            call_with(first, x, "", "a", "a")
        second(x, "aa")
        first(x)
        assert [controller.step for controller in fxprec.backend_of(first).controllers] == [2], "what is compiled runs"
    assert len(fxprec.backend_of(second).plans) == 1
    call_with(first, x, "a")
    assert len(fxprec.backend_of(first).plans) == 2, "the limit was raised"


def test_strict_makes_a_limit_an_error() -> None:
    block, x = Block(), torch.randn(4, 8)
    compile_by_name(block, strict=True)
    with limits(recompile_limit=1):
        block(x)
        for _ in range(2):
            with pytest.raises(fxprec.FallbackError, match=r"runs uncompiled.*raise the limit"):
                block(x, "a")
        block(x)


def test_other_backends_keep_the_count_of_dynamo() -> None:
    block, x = Block(), torch.randn(4, 8)
    compiled = torch.compile(block, backend="aot_eager")
    with limits(recompile_limit=1, fail_on_recompile_limit_hit=True):
        compiled(x)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(x, "a")
