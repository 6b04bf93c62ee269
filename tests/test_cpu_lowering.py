"""The CPU's kernel calls against the reference lowering, over whole networks, their graphs interpreted.

Without Inductor's code generation both lowerings make the same library calls, only channels-last convolutions sum in
another order. Where that flips one ReLU, a gradient moves by up to 3 %; memory written twice or read too early shows as
an error of 100 %.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from backend_helpers import FINE, relative_error
from op_by_op import run_op_by_op
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # examples/ is not installed

import fxprec.driver.compilation
from examples.models import shufflenet, squeezenet
from fxprec.demo.models import CharTransformer

PICTURES = (4, 3, 32, 32)


def short_shufflenet() -> nn.Module:
    """Of each stage the first two units, one of each kind: the others repeat the second."""
    with mock.patch.object(shufflenet, "STAGES", [(base, 2) for base, _ in shufflenet.STAGES]):
        return shufflenet.shufflenet_v2(10, 0.25)


def short_squeezenet() -> nn.Module:
    """Three fires, the second of them bypassed, and a pool between: the others repeat them."""
    with mock.patch.multiple(squeezenet, FIRES=((16, 128), (16, 128), (32, 256)), POOL_AFTER=(1,)):
        return squeezenet.squeezenet(10, 0.125)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "shufflenet_v2": (short_shufflenet, lambda: torch.randn(PICTURES)),
    "squeezenet": (short_squeezenet, lambda: torch.randn(PICTURES)),
    "transformer": (
        lambda: CharTransformer(vocab=31, context=16, layers=2, width=16, heads=2),
        lambda: torch.randint(0, 31, (2, 16)),
    ),
}


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxprec.driver.compilation.compat, "compile_fx_inner", run_op_by_op())


def step(model: nn.Module, x: Tensor, lowering: str, **options: Any) -> list[Tensor]:
    torch.compiler.reset()
    backend = fxprec.Backend(fxprec.Config(lowering=lowering, low_ratio=1.0, promote_above=None, **options))
    compiled = torch.compile(model, backend=backend)
    out = compiled(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("name", "storage"),
    [("squeezenet", "packed"), ("squeezenet", "simulate"), ("shufflenet_v2", "packed"), ("transformer", "packed")],
)
def test_kernel_calls_agree_with_the_reference(no_codegen: None, name: str, storage: str) -> None:
    make, batch = NETWORKS[name]
    torch.manual_seed(0)
    model, x = make(), batch()
    before = copy.deepcopy(list(model.parameters()))
    found = step(copy.deepcopy(model), x, "auto", recipe=FINE, storage=storage)
    wanted = step(model, x, "eager", recipe=FINE, storage=storage)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert relative_error(a, b) < (0.1 if i else 1e-4), f"tensor {i}"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
