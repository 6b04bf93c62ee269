"""Option ``mode`` on a CPU, where Inductor records no CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec
from fxprec.driver.interpreter import interpreted
from fxprec.errors import FallbackError, FxprecWarning

WORDS = "^mode: mode='reduce-overhead' has no effect: it records CUDA graphs, and the model is on a CPU; leave it out$"


def gradients(**options: object) -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 384), nn.SiLU(), nn.Linear(384, 96))
    compiled = torch.compile(model, backend="fxprec", options={"recipe": "fp8", **options})
    compiled(torch.randn(512, 96)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:mode. mode='reduce-overhead' has no effect")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_with_cuda_graphs_trains_on_a_cpu(mode: str) -> None:
    """Inductor moved kernels behind the last use of their buffers: `UnboundLocalError` for ``buf5``."""
    for found, wanted in zip(gradients(mode=mode), gradients(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_reduce_overhead_is_told_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxprec.compat, "compile_fx_inner", lambda gm, examples, **options: interpreted(gm))
    model = torch.compile(nn.Linear(16, 16), backend="fxprec", options={"mode": "reduce-overhead"})
    with pytest.warns(FxprecWarning, match=WORDS):
        model(torch.ones(4, 16))
    torch.compiler.reset()
    model = torch.compile(nn.Linear(16, 16), backend="fxprec", options={"mode": "reduce-overhead", "strict": True})
    with pytest.raises(FallbackError, match="mode='reduce-overhead' has no effect"):
        model(torch.ones(4, 16))
