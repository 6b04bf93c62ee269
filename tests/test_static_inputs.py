"""Static inputs: what CUDA graphs read in place, where every other input is copied in every forward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx

import fxprec
from fxprec.driver.interpreter import interpreted
from fxprec.ir.symbolic import TABLE_COLUMNS


class Recorded:
    """Stands for Inductor's compiler of one half; keeps the static inputs, forward's first."""

    def __init__(self) -> None:
        self.static: list[list[int]] = []
        self.shapes: list[list[tuple[int, ...]]] = []

    def __call__(self, gm: torch.fx.GraphModule, examples: Any, **options: Any) -> Any:
        self.static.append(list(options["static_input_idxs"]))
        self.shapes.append([tuple(example.shape) for example in examples])
        return interpreted(gm)


def step(backend: Any, **options: Any) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))
    compiled = torch.compile(model, backend=backend, options=options or None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no bf16 GEMM, on some CPUs
        compiled(torch.ones(8, 16)).sum().backward()


@pytest.fixture
def by_fxprec(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(fxprec.compat, "compile_fx_inner", found)
    return found


def test_static_inputs_are_those_of_inductor(by_fxprec: Recorded) -> None:
    """CUDA graphs copied each weight in each forward, and left out a model whose forward writes into a buffer."""
    by_inductor = Recorded()
    step(lambda gm, examples: compile_fx(gm, examples, inner_compile=by_inductor))
    step("fxprec")
    assert len(by_inductor.static[0]) == 9, "four of the layers, two of the norm, and its three buffers"
    assert by_fxprec.static[0] == by_inductor.static[0]


def test_the_table_is_not_static(by_fxprec: Recorded) -> None:
    """Each change of scales makes a new table, and CUDA graphs record anew for each address of a static input."""
    step("fxprec", recipe="fp8")
    table = by_fxprec.shapes[0].index((256, TABLE_COLUMNS))
    assert len(by_fxprec.static[0]) == 9
    assert table not in by_fxprec.static[0]
