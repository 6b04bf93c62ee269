"""Pass scale-copies: stored copies carry scales that cancel, whatever they are, in all that reads them."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from one_pass import run_pass
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import assert_bits_equal, compiled, eager_backend, gradients
from models import Apply, Parts
from op_by_op import run_op_by_op
from processors import plan_on

import fxprec
from fxprec.config.recipes import Recipe
from fxprec.ir.symbolic import AS_STORED, CodedGemm, Dequantize, Quantize
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.gemm_costs import Gpu
from fxprec.runtime.scaling.copies import CopyScales

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
WIDE = Recipe(name="wide", hi="fp32", lo_forward="1-6-1", lo_backward="fp32")
"""8 bits whose smallest number is 2^-31 and largest 1.5 * 2^32: scaled by 2^-10 to 2^10, numbers near 1 round alike."""


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.LeakyReLU())


def gated() -> nn.Module:
    """A piece of what is stored is compared with 0, and another is multiplied."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        value, gate = x.chunk(2, -1)
        return F.leaky_relu(value) * torch.sigmoid(gate)

    return nn.Sequential(nn.Linear(16, 64), Apply(gate), nn.Linear(32, 16))


MODELS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "gelu": (lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), (32, 16), {}),
    "relu": (lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), (32, 16), {}),
    "convolutions": (Convolutions, (4, 3, 8, 8), {}),
    "gated": (gated, (32, 16), {}),
    "budget": (lambda: nn.Sequential(*(gated() for _ in range(4))), (256, 16), {"peak_budget": "60%"}),
}


def step(make: Any, shape: tuple[int, ...], exps: Any, **options: Any) -> tuple[dict[str, torch.Tensor], set[int]]:
    """Gradients of one step under scales of the test's choice, and the rows that have scales."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape, requires_grad=True)
    rows = set[int]()

    def chosen(self: CopyScales) -> tuple[int, ...]:
        rows.update(copy.row for copy in self.graph.copies)
        return tuple(exps(copy.row) for copy in self.graph.copies)

    torch.compiler.reset()
    options = {"recipe": WIDE, "storage": "packed", "low_ratio": 1.0, **options}
    with mock.patch.object(CopyScales, "exps", property(chosen)):
        backend = fxprec.Backend(fxprec.Config(**{"lowering": "eager", **options}))
        out = torch.compile(model, backend=backend)(x)
        out.square().sum().backward()
    return {**gradients(model), "x": x.grad, "out": out.detach()}, rows


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_scales_cancel(name: str, seed: int) -> None:
    make, shape, options = MODELS[name]
    wanted, rows = step(make, shape, lambda row: 0, **options)
    got, _ = step(make, shape, lambda row: random.Random(f"{seed} {row}").randint(-10, 10), **options)
    assert rows
    for key in wanted:
        assert_bits_equal(got[key], wanted[key], key)


@pytest.mark.parametrize("name", ["relu", "convolutions"])
def test_scales_cancel_in_compiled_loops(name: str) -> None:
    make, shape, options = MODELS[name]
    wanted, _ = step(make, shape, lambda row: 0, lowering="inductor", **options)
    got, rows = step(make, shape, lambda row: 3 * row % 17 - 8, lowering="inductor", **options)
    assert rows
    for key in wanted:
        assert_bits_equal(got[key], wanted[key], key)


def test_scales_cancel_in_gemms_over_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, dX and dW multiply codes of activations, weights and gradients as on an H100."""
    seen: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: Gpu("NVIDIA H100 80GB HBM3", (9, 0)))
    plan_on(monkeypatch, "avx512+bf16+fp16")
    monkeypatch.setattr(fxprec.driver.compilation.compat, "compile_fx_inner", run_op_by_op(seen))
    recipe = Recipe(name="swapped", hi="bf16", lo_forward="e5m2", lo_backward="e4m3fn")
    make, shape, _ = MODELS["relu"]
    options = {"recipe": recipe, "storage": "native", "gemms": "low", "lowering": "inductor", "promote_above": None}
    wanted, rows = step(make, shape, lambda row: 0, **options)
    got, _ = step(make, shape, lambda row: 5 * row % 9 - 4, **options)
    assert len(rows) >= 3, "both weights, and an activation at least"
    assert any(node.target is torch.ops.aten._scaled_mm.default for gm in seen for node in gm.graph.nodes)
    for key in wanted:  # what is below 2^-10 rounds otherwise
        assert float((got[key] - wanted[key]).norm() / wanted[key].norm()) < 2e-3, key


def test_whoever_reads_a_copy_takes_its_scale_off() -> None:
    ran = run_pass("scale-copies", MODELS["relu"][0](), torch.randn(32, 16), recipe="fp8", low_ratio=1.0)
    copies = {copy.row for copy in ran.work.scales.copies}
    casts = {cast.row for _, cast in Quantize.among(Quantize.nodes(ran.graph))}
    assert copies == casts != set()
    reads = [read.row for _, read in Dequantize.among(Dequantize.nodes(ran.graph))]
    assert AS_STORED not in reads
    assert set(reads) == casts
    assert not list(CodedGemm.among(ran.graph.nodes)), "on a CPU"


@pytest.mark.parametrize("options", [{"recipe": "bf16"}, {"recipe": "fp16"}, {"recipe": "fp8", "storage": "simulate"}])
def test_16_bits_and_simulation_have_no_scales_of_copies(options: dict[str, str]) -> None:
    step_ = compiled(MODELS["relu"][0](), backend := eager_backend(low_ratio=1.0, **options))
    step_(torch.randn(32, 16)).sum().backward()
    assert all(controller.copies is None for controller in backend.controllers)


@pytest.mark.parametrize(("bound", "scaled"), [(6, {"args.0", "addmm"}), (0.1, {"args.0"})])
def test_what_is_compared_with_a_number_near_0_has_no_scale(bound: float, scaled: set[str]) -> None:
    """Scaled down by 3 binades, 0.1 is no normal number of e4m3fn: those beside it are others than without a scale."""
    bounded = Apply(lambda x: F.hardtanh(x, 0, bound) * x)
    model = nn.Sequential(nn.Linear(16, 64), bounded, nn.Linear(64, 16))
    ran = run_pass("scale-copies", model, torch.randn(32, 16), recipe="fp8", low_ratio=1.0)
    held = {site.id: site.tensor for site in ran.work.book.sites if site.format == "e4m3fn"}
    assert set(held.values()) == {"args.0", "addmm"}, "hardtanh's backward compares its operand with 0 and the bound"
    assert {held[copy.row] for copy in ran.work.scales.copies} == scaled


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.ReLU6])
@pytest.mark.parametrize("small", [1e-2, 1e-4, 1e-7])
def test_small_activations_train_as_large_ones(activation: type[nn.Module], small: float) -> None:
    """From the third step on their copies lose what those of activations near 1 lose."""
    lost, _ = errors(activation, 1.0)
    found, backend = errors(activation, small)
    for name, error in found.items():
        assert error < 1.5 * lost[name] + 1e-3, name
    scales = {row["scale_exponent"] for row in backend.stats() if row["kind"] == "output"}
    assert max(scales) >= -math.log2(small), "activations of about that size, times 2 to this, are near 1"
    assert not [e for e in backend.events if e.kind == "promotion"]


def errors(activation: type[nn.Module], size: float) -> tuple[dict[str, float], fxprec.Backend]:
    """How far each gradient is from float32's in the fourth step, where activations are of such a size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), activation(), nn.Linear(128, 32))
    with torch.no_grad():
        for p in model[0].parameters():
            p.mul_(size)
    x, ones = torch.randn(256, 64), torch.randn(256, 32)
    ours = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    for _ in range(4):
        model.zero_grad()
        (model(x) * ones).sum().backward()
        wanted = gradients(model)
        model.zero_grad()
        (ours(x) * ones).sum().backward()
    found = gradients(model)
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in wanted.items()}, backend


def test_a_large_activation_still_is_promoted() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    ours = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    for _ in range(3):
        ours(torch.randn(256, 16) * 5000).sum().backward()
    assert [e for e in backend.events if e.kind == "promotion"]


@pytest.mark.parametrize("power", [1, 8])
@pytest.mark.parametrize(("largest", "ends"), [(600.0, "scaled"), (3000.0, "scaled"), (30_000.0, "promoted")])
def test_a_few_outliers_are_clipped_in_no_later_step(largest: float, ends: str, power: int) -> None:
    """Of one channel in 128: fewer elements than `promote_above`, and nearly all of the gradient's norm."""
    a, b, x = nn.Linear(64, 128), nn.Linear(128, 16), torch.randn(256, 64)
    with torch.no_grad():
        a.weight[0] *= (largest ** (1 / power)) / float(F.relu(a(x))[:, 0].max())

    model = Parts(lambda m, x: m.b(F.relu(m.a(x)) if power == 1 else F.relu(m.a(x)) ** power), a=a, b=b)
    x[0] *= 1.01  # the largest is not exactly a number of the format
    ours = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    model(x).square().sum().backward()
    wanted, errors = gradients(model), []
    for _ in range(4):
        model.zero_grad()
        ours(x).square().sum().backward()
        errors.append(float((gradients(model)["b.weight"] - wanted["b.weight"]).norm() / wanted["b.weight"].norm()))
    assert errors[0] > 3 * max(errors[2:]), "clipped at first"
    assert max(errors[2:]) < 0.05
    kinds = [event.kind for event in backend.events]
    assert kinds[0] == "scale"
    assert ("promotion" in kinds) == (ends == "promoted")


def test_another_batch_size_begins_with_the_scales_found() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    with torch.no_grad():
        model[0].weight.mul_(1e-4), model[0].bias.zero_()
    ours = compiled(model, backend := eager_backend("fp8", low_ratio=1.0), dynamic=False)
    for batch in (64, 64, 64, 96):
        x, ones = torch.randn(batch, 64), torch.randn(batch, 32)
        model.zero_grad()
        (model(x) * ones).sum().backward()
        wanted = gradients(model)["2.weight"]
        model.zero_grad()
        (ours(x) * ones).sum().backward()
    assert len(backend.controllers) == 2
    assert float((gradients(model)["2.weight"] - wanted).norm() / wanted.norm()) < 0.03


def test_evaluation_multiplies_codes_at_the_scales_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: Gpu("NVIDIA H100 80GB HBM3", (9, 0)))
    plan_on(monkeypatch, "avx512+bf16+fp16")
    monkeypatch.setattr(fxprec.driver.compilation.compat, "compile_fx_inner", run_op_by_op([]))
    torch.manual_seed(0)
    model, x = MODELS["gelu"][0](), torch.randn(32, 16)
    with torch.no_grad():
        model[0].weight.mul_(1e-5), model[0].bias.zero_(), model[2].bias.zero_()
    torch.compiler.reset()
    config = fxprec.Config(recipe="fp8", low_ratio=1.0, promote_above=None, gemms="low")
    ours = torch.compile(model, backend=fxprec.Backend(config))
    for _ in range(4):
        ours(x).sum().backward()
    with torch.no_grad():
        found, wanted = ours(x), model(x)
    assert float((found - wanted).norm() / wanted.norm()) < 0.06


def test_scales_resume_bit_for_bit() -> None:
    def run(steps: range, saved: Any = None) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        with torch.no_grad():
            model[0].weight.mul_(1e-5), model[0].bias.zero_()
        ours = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
        if saved is not None:
            backend.load_state_dict(saved)
        found = []
        for i in steps:
            model.zero_grad()
            ours(torch.randn(64, 16, generator=torch.Generator().manual_seed(i)) * 3.0**i).sum().backward()
            found.append(model[2].weight.grad.clone())
        return found, backend.state_dict()

    whole, _ = run(range(6))
    _, state = run(range(3))
    rest, _ = run(range(3, 6), state)
    for got, wanted in zip(rest, whole[3:], strict=True):
        assert_bits_equal(got, wanted)
