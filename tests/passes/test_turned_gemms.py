"""Pass block-gemms with operands of gradients turned (Hadamard), rounded at random, or corrected (MS-EDEN)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocks_by_hand import EVERY, NVFP4_EDEN, along_rows, batch, layers, ran, recipe, trained
from helpers import compiled, eager_backend, gradients
from torch import Tensor, nn

from fxprec.errors import FxprecWarning
from fxprec.ir.symbolic import CorrectScales, Quantize, Rotate
from fxprec.passes.analysis.joint import is_backward


def test_operands_of_the_weights_gradient_are_turned_and_gradients_rounded_at_random() -> None:
    found = ran(recipe="nvfp4")
    assert found.halves(Rotate.target) == (0, 4)
    casts = [(q, Quantize.of(q)) for q in found.nodes(Quantize.target) if Quantize.of(q).format != "bf16"]
    turned = [cast for _, cast in casts if cast.x.target is Rotate.target]
    assert len(turned) == 4
    random = [q for q, cast in casts if cast.seed is not None]
    assert len(random) == 3, "the gradient in each backward product; none wants the first layer's input gradient"
    assert all(map(is_backward, random))
    assert len({cast.row for _, cast in casts}) == len(casts), "each draws other random numbers"
    assert {cast.format for _, cast in casts} == {"nvfp4", "1-2-1/256:e4m3fn*"}


FINE = "e4m3fn/16:bf16"


@pytest.mark.parametrize(
    "turned", [{"weight_grad": "mxfp8", "hadamard": True}, {**dict.fromkeys(EVERY, FINE), "eden": 32}]
)
@pytest.mark.parametrize("storage", ["native", "simulate"])
def test_the_hadamard_matrix_cancels(storage: str, turned: dict[str, Any]) -> None:
    """With formats as fine as these the rotation would show as an error of the size of the gradient."""
    model, x = layers(), batch()
    _, exact = trained(eager_backend("bf16"), model, x)
    _, found = trained(eager_backend(recipe(**turned), storage=storage), model, x)
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() < 0.06 * gradient.norm(), name


def test_eden_turns_and_corrects_both_operands_of_the_gradients_products() -> None:
    found = ran(recipe=recipe(**NVFP4_EDEN))
    assert found.halves(Rotate.target) == found.halves(CorrectScales.target) == (0, 6)
    assert {Rotate.of(node).size for node in found.nodes(Rotate.target)} == {32}
    casts = [Quantize.of(q) for q in found.nodes(Quantize.target)]
    assert all(cast.seed is None for cast in casts), "elements are rounded to nearest"
    assert [cast.format for cast in casts].count("1-2-1/256:e4m3fn*") == 2, "a turned weight has no squares"
    said = "operands of gradients' products rotated 32 elements at a time, with scales by MS-EDEN)"
    assert found.work.remarks[-1].endswith(said)


def test_sizes_that_no_turned_vector_fits_are_left_and_the_user_is_told() -> None:
    first, last = ran(recipe=recipe(**{**NVFP4_EDEN, "eden": 64})).work.operand_formats
    assert (len(first.formats), first.why) == (2, ""), "64 tokens; no gradient of the input"
    assert last.why == "input_grad: 32 is not a multiple of 64, which a Hadamard matrix of that size needs"


def test_a_given_plan_whose_scales_cannot_be_corrected_is_told(tmp_path: Any) -> None:
    model, x = layers(), batch()
    backend = eager_backend(recipe(**EVERY))
    trained(backend, model, x)
    backend.plans[0].save(tmp_path / "plan.json")
    again = eager_backend(recipe(**NVFP4_EDEN), plan=tmp_path / "plan.json")
    with pytest.warns(FxprecWarning, match="the scales of mxfp8_e4m3 are powers of two"):
        trained(again, model, x)


@pytest.mark.parametrize("asked", ["nvfp4", recipe(**NVFP4_EDEN)])
def test_a_seed_repeats_a_step(asked: Any) -> None:
    model, x = layers(), batch()
    step = compiled(model, eager_backend(asked))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        step(x).square().mean().backward()
        found.append(gradients(model)["2.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("hadamard", [False, True])
def test_the_mean_of_a_weights_gradient_over_steps_is_that_of_unrounded_gradients(hadamard: bool) -> None:
    """Of x rounded to nearest, which the gradient of the result multiplies; turned, of x as each step's matrix turns it."""
    generator = torch.Generator().manual_seed(7)
    x, g = torch.randn(32, 16, generator=generator), torch.randn(32, 16, generator=generator)
    if hadamard:
        x = torch.zeros_like(x)
        x[3], x[20] = 1.0, -2.0  # turned, a row of equal magnitudes, which NVFP4 has exactly
    model = nn.Linear(16, 16, bias=False)
    step = compiled(model, eager_backend(recipe(weight_grad="nvfp4", stochastic=True, hadamard=hadamard)))
    torch.manual_seed(0)
    found = []
    for _ in range(300):
        step(x).backward(g)
        found.append(gradients(model)["weight"].double())
    wanted = g.double().mT @ (x if hadamard else along_rows(x, "nvfp4")).double()
    side = torch.sign(wanted)  # a bias towards 0, as rounding to nearest has, adds up
    error = torch.stack([((dw - wanted) * side).sum() for dw in found])
    assert error.std() > 0
    assert abs(float(error.mean())) <= 3 * float(error.std()) / len(found) ** 0.5


def test_with_eden_the_mean_of_a_weights_gradient_is_the_exact_one() -> None:
    """The input is no more biased than the gradient: both operands are turned anew in each step."""
    generator = torch.Generator().manual_seed(7)
    x, g = torch.randn(128, 16, generator=generator), torch.randn(128, 16, generator=generator)
    model = nn.Linear(16, 16, bias=False)
    step = compiled(model, eager_backend(recipe(weight_grad="nvfp4", eden=128)))
    torch.manual_seed(0)
    wanted, found = g.double().mT @ x.double(), []
    for _ in range(300):
        step(x).backward(g)
        found.append(gradients(model)["weight"].double())
    error = torch.stack([((dw - wanted) * wanted).sum() for dw in found])
    assert abs(float(error.mean())) <= 3 * float(error.std()) / len(found) ** 0.5
    rounded = along_rows(g, "nvfp4").double().mT @ along_rows(x, "nvfp4").double()
    assert (torch.stack(found).mean(0) - wanted).norm() < 0.3 * (rounded - wanted).norm()


def with_outliers(size: float, mean: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return x and its layer's gradient: of 16 tokens one is an outlier of x, in every channel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4096, 32, generator=generator) + mean
    g = torch.randn(4096, 32, generator=generator) + mean
    x[::16] = size * torch.sign(torch.randn(256, 32, generator=generator))
    return x, g


def error_of_weight_gradient(x: Tensor, g: Tensor, *, hadamard: bool) -> float:
    model = nn.Linear(32, 32, bias=False)
    out = compiled(model, eager_backend(recipe(weight_grad="nvfp4", hadamard=hadamard)))(x)
    torch.manual_seed(0)
    out.backward(g)
    assert model.weight.grad is not None
    return float((model.weight.grad - (g.double().mT @ x.double()).float()).norm())


@pytest.mark.parametrize("seed", range(3))
def test_a_hadamard_matrix_keeps_what_outliers_would_take_away(seed: int) -> None:
    """Outliers of 100 times what else is there: nothing else is left of their blocks. Both sides round to nearest."""
    x, g = with_outliers(100.0, 1.0, seed)
    plain, turned = (error_of_weight_gradient(x, g, hadamard=hadamard) for hadamard in (False, True))
    assert plain > 3 * turned, (plain, turned)


def test_a_hadamard_matrix_costs_accuracy_where_nothing_underflows() -> None:
    """Outliers of 20 times leave the rest its own codes, and turned they are an error of every element."""
    x, g = with_outliers(20.0, 0.0, 0)
    plain, turned = (error_of_weight_gradient(x, g, hadamard=hadamard) for hadamard in (False, True))
    assert plain < turned < 1.2 * plain, (plain, turned)


@pytest.mark.parametrize("asked", ["nvfp4", recipe(**NVFP4_EDEN)], ids=["nvfp4", "eden"])
def test_a_compiled_step_turns_and_rounds_at_random(asked: Any) -> None:
    model, x = layers(), batch()
    _, exact = trained(eager_backend("bf16"), model, x)
    _, found = trained(eager_backend(asked, lowering="auto"), model, x)
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() < 0.4 * gradient.norm(), name
