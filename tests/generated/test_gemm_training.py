"""Training steps as a GPU would run them, GEMMs over codes included: lowered for one, run in Triton's interpreter.

Inductor's own kernels are left out: what it would fuse runs op by op. Run in a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import interpreted
from op_by_op import run_op_by_op
from processors import plan_on
from torch import Tensor, nn

import fxprec.driver.compilation
import fxprec.driver.half_compilation
from fxprec import Backend, Config, GradScaling
from fxprec.kernels import coded_gemms
from fxprec.kernels.layout import SideBySide
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.gemm_costs import Gpu
from fxprec.passes.lowering.lower import lower

pytestmark = interpreted
aten = torch.ops.aten
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0))


class Network(nn.Module):
    """(batch, 16) to (batch, 16): norm, two linear layers with a ReLU, a residual add, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down, self.head = (nn.Linear(*n) for n in ((16, 32), (32, 16), (16, 16)))
        self.gated = nn.Linear(16, 32, bias=False)  # a bias wants its gradient whole

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        gate, other = self.gated(x).chunk(2, -1)
        return self.head(nn.functional.silu(gate) * other)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Lower for a CUDA device, build nothing; collect the graphs."""
    seen: list[torch.fx.GraphModule] = []

    def for_a_gpu(gm: torch.fx.GraphModule, lowering: str, device: str, *args: Any, **options: Any) -> Any:
        assert device == "cpu"
        return lower(gm, lowering, "cuda" if lowering == "auto" else device, *args, **options)

    plan_on(monkeypatch, "avx512+bf16+fp16")
    monkeypatch.setattr(fxprec.driver.compilation.compat, "compile_fx_inner", run_op_by_op(seen))
    monkeypatch.setattr(fxprec.driver.half_compilation, "lower", for_a_gpu)
    return seen


def train(lowering: str, **options: Any) -> tuple[list[Tensor], Backend]:
    """Losses and parameters of four steps, which measure and refresh scales twice; the second is loud."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Network()
    backend = Backend(Config(lowering=lowering, low_ratio=1.0, gemms="low", promote_above=None, **options))
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 16, generator=generator)
        loss = compiled(x).square().mean() * (1e6 if step == 1 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        if step != 1:
            optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())], backend


@pytest.mark.filterwarnings("ignore:weigh-gemms")
@pytest.mark.parametrize(
    ("lowering", "recipe", "storage", "gpu", "estimate"),
    [
        ("auto", "fp8", "native", H100, "statistical"),
        pytest.param("auto", "fp8", "native", A100, "histogram", marks=pytest.mark.full),
        ("auto", "hfp8", "packed", H100, "statistical"),
        ("triton", "fp8", "packed", H100, "histogram"),
        ("triton", "fp8", "native", A100, "statistical"),
        pytest.param("triton", "hfp8", "packed", A100, None, marks=pytest.mark.full),
    ],
)
def test_steps_for_a_gpu_have_the_references_bits(
    monkeypatch: pytest.MonkeyPatch,
    lowered: list[Any],
    recipe: str,
    storage: str,
    gpu: Gpu,
    estimate: str,
    lowering: str,
) -> None:
    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: gpu)
    scaling = "none" if estimate is None else GradScaling(estimate=estimate, interval=2)
    options = {"recipe": recipe, "storage": storage, "grad_scaling": scaling}
    found, backend = train(lowering, **options)
    wanted, reference = train("eager", **options)
    for got, right in zip(found, wanted, strict=True):
        assert torch.equal(got, right)
    for got, right in zip(backend.stats(), reference.stats(), strict=True):
        same = ("site", "overflow_ratio", "underflow_ratio", "amax", "scale_exponent")
        assert [got[k] for k in same] == [right[k] for k in same]
    if lowering == "auto":
        called = {coded_gemms.kernel_called(n) for gm in lowered for n in gm.graph.nodes} - {None}
        native = [n for gm in lowered for n in gm.graph.nodes if n.target is aten._scaled_mm.default]
        assert len(native) == (0 if gpu is A100 or recipe == "hfp8" else 12), "three GEMMs of four layers"
        kinds = {k.kind for k in called if k is not None}
        assert ("gemm" in kinds) == (not native)
        assert ("quantize+transpose" in kinds) == bool(native)
        assert "totals" in kinds
        joins = [n for gm in lowered for n in gm.graph.nodes if n.target is SideBySide.target]
        assert len(joins) == (1 if estimate == "histogram" else 2), (
            "what the gated layer's product is saved as; its gradient"
        )
