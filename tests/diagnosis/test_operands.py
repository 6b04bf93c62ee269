"""The doctor of a recipe that rounds GEMM operands: which GEMMs do damage, and which to hold high."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models import Apply
from torch import nn

import fxprec
from fxprec.diagnosis import examine
from fxprec.diagnosis.adjoint import Sensitivity, sensitivities
from fxprec.diagnosis.advice import gemms_to_hold
from fxprec.diagnosis.lab import Lab
from fxprec.diagnosis.rows import GemmRow
from fxprec.errors import ConfigError

PLANTED = "3"


def outliers(x: torch.Tensor) -> torch.Tensor:
    """Make every 16th feature 200 times as large, and its weights in the next layer as much smaller."""
    return x * torch.where(torch.arange(x.shape[-1]) % 16 == 0, 200.0, 1.0)


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    sizes = [64, 64, 64, 64, 64, 64, 64, 64]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    with torch.no_grad():
        layers[2].weight[:, ::16] /= 200
    model = nn.Sequential(*layers[:2], Apply(outliers), *layers[2:])
    return model, torch.randn(128, 64)


@pytest.fixture(scope="module")
def examined() -> fxprec.Diagnosis:
    torch.compiler.reset()  # other shapes seen before would make these dynamic
    model, x = network()
    return fxprec.doctor(model, x, options={"recipe": "nvfp4", "formats": ("e4m3fn",), "reruns": 0})


def test_the_layer_with_outliers_is_named_first_and_held_high(examined: fxprec.Diagnosis) -> None:
    first, second, *_ = examined.gemms
    assert first.module == PLANTED
    assert first.damage > 1.5 * second.damage
    assert examined.recommended == {"recipe": "nvfp4", "keep_high": (PLANTED,)}
    assert "GEMMs with at most 15% of the weights high" in examined.advice.reason
    assert "GEMMs with operands in blocks, each alone rounded and re-run" in str(examined)


def test_operands_with_corrected_scales_are_examined() -> None:
    model, x = network()
    recipe = fxprec.Recipe(
        name="eden",
        hi="bf16",
        lo_forward="bf16",
        lo_backward="bf16",
        operands={"input_grad": "nvfp4", "weight_grad": "nvfp4", "eden": 64},
    )
    found = fxprec.doctor(model, x, options={"recipe": recipe, "formats": ("e4m3fn",), "reruns": 0})
    assert all(0.01 < row.damage < 0.3 for row in found.gemms)


def test_every_gemm_has_a_row_and_damages_add_up_as_squares(examined: fxprec.Diagnosis) -> None:
    assert sorted(row.gemm for row in examined.gemms) == list(range(7))
    assert {row.elements for row in examined.gemms} == {64 * 64}
    checks = {check.name: check for check in examined.whole}
    for name in ("operands as planned", "operands as recommended"):
        assert checks[name].predicted == pytest.approx(checks[name].measured, rel=0.25)
    assert checks["operands as recommended"].measured < 0.8 * checks["operands as planned"].measured


def test_stored_tensors_are_those_of_the_recipe_without_operands(examined: fxprec.Diagnosis) -> None:
    model, x = network()
    plain = fxprec.doctor(model, x, options={"recipe": "bf16", "formats": ("e4m3fn",), "reruns": 0})
    assert plain.gemms == ()
    rows = {row.site: row for row in examined.ranking}
    assert "addmm_6" not in {row.tensor for row in rows.values()}, "the loss reads it: it keeps its dtype"
    assert {(row.site, row.tensor) for row in rows.values()} == {(row.site, row.tensor) for row in plain.ranking}
    damages = {row.site: row.damage for row in plain.ranking}
    assert {site: row.damage for site, row in rows.items()} == pytest.approx(damages, rel=0.2)  # of other probes


def test_the_exact_step_rounds_no_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss, too, is one of exact outputs: the gradients were up to 64 % off."""
    found = []
    run = Lab.run
    monkeypatch.setattr(Lab, "run", lambda self, *args, **kwargs: found.append(run(self, *args, **kwargs)) or found[-1])
    model, x = network()
    fxprec.doctor(model, x, options={"recipe": "nvfp4", "formats": ("e4m3fn",), "reruns": 0})
    exact = [g for g in found[0] if isinstance(g, torch.Tensor)]
    wide = model.double()
    wide(x.double()).square().mean().backward()
    for gradient, parameter in zip(exact, wide.parameters(), strict=True):
        assert float((gradient - parameter.grad).norm() / parameter.grad.norm()) < 1e-4


def test_operands_have_no_sensitivities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 28 bytes an element, and the GEMMs are re-run instead."""
    found = []

    def kept(*args: Any, **kwargs: Any) -> dict[str, Sensitivity]:
        found.append((args[0], sensitivities(*args, **kwargs)))
        return found[-1][1]

    monkeypatch.setattr(examine, "sensitivities", kept)
    model, x = network()
    fxprec.doctor(model, x, options={"recipe": "nvfp4", "formats": ("e4m3fn",), "reruns": 0})
    (lab, by_cast), *others = found
    assert not others
    assert set(by_cast) == {cast.name for cast in lab.casts if cast.operand_of is None and cast.reads}


def row(module: str, elements: int, damage: float) -> GemmRow:
    return GemmRow(graph=0, gemm=0, module=module, elements=elements, damage=damage, progress=0.0)


def test_a_share_buys_the_set_that_does_most_damage() -> None:
    rows = [row("a", 60, 0.5), row("b", 30, 0.4), row("c", 30, 0.4), row("", 80, 0.1)]
    assert gemms_to_hold(rows, 0.3) == ["b", "c"], "0.4^2 twice is more than 0.5^2"
    assert gemms_to_hold(rows, 0.0) == []
    assert gemms_to_hold(rows, 1.0) == ["a", "b", "c", "."]


def test_a_share_is_from_0_to_1() -> None:
    model, x = network()
    with pytest.raises(ConfigError, match="high_share"):
        fxprec.doctor(model, x, options={"recipe": "nvfp4", "high_share": 1.5})


@pytest.mark.parametrize("between", [nn.GELU(), nn.LayerNorm(64)], ids=["activation", "norm"])
def test_an_operand_that_backward_computes_again_belongs_to_its_gemm(between: nn.Module) -> None:
    """Its cast was taken for a stored tensor's, and the doctor ended with an IndexError."""
    model = nn.Sequential(nn.Linear(64, 64), between, nn.Linear(64, 64))
    options = {"recipe": "nvfp4", "formats": ("e4m3fn",), "reruns": 0}
    found = fxprec.doctor(model, torch.randn(64, 64), loss=lambda y: y.square().mean(), options=options)
    assert sorted(row.module for row in found.gemms) == ["0", "2"]
