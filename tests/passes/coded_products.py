"""Training steps whose products multiply operands in blocks, for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxprec
from fxprec import compat
from fxprec.driver import half_compilation, interpreter
from fxprec.driver.record import Recorder


def operands(**options: Any) -> fxprec.Recipe:
    """Return a recipe with these `fxprec.Operands`, bf16 otherwise."""
    return fxprec.Recipe(
        name="mine", hi="bf16", lo_forward="bf16", lo_backward="bf16", operands=fxprec.Operands(**options)
    )


def recorded(recipe: str | fxprec.Recipe, model: nn.Module, *args: torch.Tensor) -> Any:
    """Return the halves of a training step, casts symbolic, with the arguments of the step."""
    torch.compiler.reset()
    recorder = Recorder()
    config = fxprec.Config(recipe=recipe, lowering="eager")
    call = torch.compile(model, backend=fxprec.Backend(config, recorder=recorder))
    call(*args).float().square().mean().backward()
    return recorder.graphs["graph 0"]


def lower_as_on_sm_100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower as on sm_100, and run what Inductor would compile op by op: it takes minutes to make C++ of a GPU's code."""
    monkeypatch.setattr(half_compilation, "multiplies_blocks", lambda device: True)
    monkeypatch.setattr(compat, "compile_fx_inner", lambda gm, examples, **options: interpreter.interpreted(gm))
