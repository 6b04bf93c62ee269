"""Pass block-gemms: each product of a layer multiplies operands rounded along the dimension it sums over."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import compiled, eager_backend, gradients, recorded_works
from one_pass import Ran, run_pass
from torch import Tensor, nn

import fxprec
from fxprec import Operands, Plan, Recipe
from fxprec.config.recipes import NVFP4
from fxprec.errors import FallbackError, FxprecWarning
from fxprec.ir.symbolic import CorrectScales, Dequantize, Quantize, Rotate
from fxprec.passes.analysis.joint import is_backward
from fxprec.passes.analysis.peak.step import Step
from fxprec.passes.block_gemms import KEPT_HIGH, TWO_VALUES
from fxprec.plan.explain import explain

aten = torch.ops.aten
NAME = "block-gemms"
MXFP8 = "e4m3fn/32:e8m0up"  # as recipe "mxfp8" has it
EVERY = {"forward": "mxfp8", "input_grad": "mxfp8", "weight_grad": "mxfp8"}
NVFP4_EDEN = {**dict.fromkeys(EVERY, "nvfp4"), "square_weights": True, "eden": 32}


def recipe(**operands: Any) -> Recipe:
    """Nothing else than operands is rounded."""
    return Recipe(name="test", hi="fp32", lo_forward="fp32", lo_backward="fp32", operands=Operands(**operands))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def batch() -> Tensor:
    return torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))


def ran(model: nn.Module | None = None, **options: Any) -> Ran:
    return run_pass(NAME, model or layers(), batch(), **({"low_ratio": None} | options))


def along_last(x: Tensor, fmt: str) -> Tensor:
    return fxprec.quantize(x.contiguous(), fmt)


def along_rows(x: Tensor, fmt: str) -> Tensor:
    return along_last(x.mT, fmt).mT


def in_squares(w: Tensor, fmt: str, n: int) -> Tensor:
    """Round a matrix tile by tile, each in a row of its own: in the block format of n x n elements."""
    rows, columns = w.shape
    tiles = [w[i : i + n, j : j + n].reshape(-1) for i in range(0, rows, n) for j in range(0, columns, n)]
    rounded = iter(along_last(torch.cat(tiles), fmt).split(n * n))
    found = torch.empty_like(w)
    for i in range(0, rows, n):
        for j in range(0, columns, n):
            found[i : i + n, j : j + n] = next(rounded).view(n, n)
    return found


class ByHand(torch.autograd.Function):
    """A linear layer whose three products round their operands, written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, formats: tuple[str, str, str], square: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.formats, ctx.square = formats, square
        weight = in_squares(w, square, 16) if square else along_last(w, formats[0])
        return torch.addmm(b, along_last(x, formats[0]), weight.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        _, of_input, of_weight = ctx.formats
        weight = in_squares(w, ctx.square, 16) if ctx.square else along_rows(w, of_input)
        dx = along_last(g, of_input) @ weight
        dw = along_last(g.mT, of_weight) @ along_rows(x, of_weight)
        return dx, dw, g.sum(0), None, None


def by_hand(model: nn.Sequential, x: Tensor, formats: tuple[str, str, str], square: str = "") -> Tensor:
    first, last = model[0], model[2]
    x = ByHand.apply(x.flatten(0, 1), first.weight, first.bias, formats, square)
    x = x * 0.5 * (1 + torch.erf(x * 0.5**0.5))  # as traced; ATen's own differs in the last bit where AVX2 is newest
    return ByHand.apply(x, last.weight, last.bias, formats, square).view(2, 32, 32)


def trained(backend: fxprec.Backend, model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = compiled(model, backend)(x)
    (out * torch.arange(32.0)).square().mean().backward()
    return out.detach(), gradients(model)


def lines_about(backend: fxprec.Backend, tensor: str) -> list[str]:
    return [line.strip() for line in explain(backend.plans[0], tensor)]


CASES = {
    "mxfp8": (EVERY, ("mxfp8",) * 3, ""),
    "mxfp8, scales up": (dict.fromkeys(EVERY, MXFP8), (MXFP8,) * 3, ""),
    "each its own": (
        {"forward": "nvfp4", "input_grad": "mxfp8", "weight_grad": "mxfp6"},
        ("nvfp4", "mxfp8", "mxfp6"),
        "",
    ),
    "squares": (
        {"forward": "nvfp4", "input_grad": "nvfp4", "weight_grad": "nvfp4", "square_weights": True},
        ("nvfp4",) * 3,
        "1-2-1/256:e4m3fn*",
    ),
}


@pytest.mark.cpu_dependent
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("storage", ["native", "simulate"])
def test_loss_and_gradients_are_those_of_rounding_by_hand(case: str, storage: str) -> None:
    operands, formats, square = CASES[case]
    model, x = layers(), batch()
    wanted = by_hand(model, x, formats, square)
    (wanted * torch.arange(32.0)).square().mean().backward()
    exact = gradients(model)
    out, found = trained(eager_backend(recipe(**operands), storage=storage), model, x)
    assert torch.equal(out, wanted.detach())
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-6, atol=2e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("product", EVERY)
def test_a_product_without_a_format_multiplies_values(product: str) -> None:
    found = ran(recipe=recipe(**{product: "mxfp8"}))
    halves = {"forward": (4, 0), "input_grad": (0, 2), "weight_grad": (0, 4)}
    assert found.halves(Quantize.target) == halves[product], "two layers, and no gradient of the input"


def test_the_plan_says_which_formats_each_gemm_has_and_is_followed() -> None:
    model, x = layers(), batch()
    backend = eager_backend("mxfp8")
    trained(backend, model, x)
    first, last = backend.plans[0].gemms
    assert (first.forward, first.input_grad, first.weight_grad) == (MXFP8, "", MXFP8)
    assert (last.forward, last.input_grad, last.weight_grad) == (MXFP8,) * 3
    said = f"rounds its operands to blocks, {MXFP8} for its value, {MXFP8} for its input's gradient, {MXFP8} for its weight's"
    assert f"GEMM 1 {said}" in lines_about(backend, "addmm_1")
    assert backend.plans[0].notes[0].startswith("block-gemms: 2 of 2 GEMMs round their operands to blocks (forward")


def test_a_plan_edited_by_hand_is_followed(tmp_path: Any) -> None:
    model, x = layers(), batch()
    asked = recipe(**NVFP4_EDEN)
    backend = eager_backend(asked)
    trained(backend, model, x)
    plan = backend.plans[0]
    assert plan.recipe.operands == asked.operands
    edited = replace(plan, gemms=(replace(plan.gemms[0], forward=""), plan.gemms[1]))
    edited.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == edited
    with recorded_works() as works:
        trained(eager_backend(asked, plan=tmp_path / "plan.json"), model, x)
    assert [found.forward is None for found in works[0].in_blocks] == [True, False]


def test_a_plan_without_operands_leaves_them_to_the_recipe(tmp_path: Any) -> None:
    model, x = layers(), batch()
    backend = eager_backend("bf16")
    trained(backend, model, x)
    backend.plans[0].save(tmp_path / "plan.json")
    with recorded_works() as works:
        trained(eager_backend("mxfp8", plan=tmp_path / "plan.json"), model, x)
    assert [len(found.formats) for found in works[0].in_blocks] == [2, 3]


def test_a_plan_with_operands_under_a_recipe_without_is_told(tmp_path: Any) -> None:
    model, x = layers(), batch()
    backend = eager_backend("mxfp8", keep_high=("2",))
    trained(backend, model, x)
    backend.plans[0].save(tmp_path / "plan.json")
    with pytest.warns(FxprecWarning, match="rounds the operands of 1 GEMMs to blocks, and recipe 'bf16' rounds none"):
        trained(eager_backend("bf16", plan=tmp_path / "plan.json"), model, x)
    again = eager_backend("mxfp8", plan=tmp_path / "plan.json")
    trained(again, model, x)
    assert [gemm.operands_why for gemm in again.plans[0].gemms] == ["", KEPT_HIGH]


def test_keep_high_holds_gemms_high() -> None:
    found = ran(recipe="nvfp4", keep_high=("2",)).work.in_blocks
    assert [len(of.formats) for of in found] == [2, 0]
    assert found[1].why == KEPT_HIGH
    backend = eager_backend("nvfp4", keep_high=("2",))
    trained(backend, layers(), batch())
    assert "GEMM 1 multiplies operands in bf16: as keep_high asks" in lines_about(backend, "addmm_1")
    assert all(not of.formats for of in ran(recipe="nvfp4", keep_high="ends").work.in_blocks), "first and last"


def test_products_of_two_values_stay_high() -> None:
    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return torch.softmax(y @ y.mT, -1) @ y

    first, *rest = ran(Attention(64, 64), recipe="mxfp8").work.in_blocks
    assert len(first.formats) == 2
    assert [of.why for of in rest] == [TWO_VALUES] * 2


def test_a_model_without_a_gemm_that_is_rounded_is_told() -> None:
    with pytest.warns(
        FxprecWarning, match="recipe 'mxfp8' rounds no GEMM's operands here; of the first, aten.convolution"
    ):
        compiled(nn.Conv2d(2, 4, 3), eager_backend("mxfp8"))(batch().unsqueeze(0))


def test_a_model_whose_gemms_are_all_kept_high_is_told_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxprecWarning)
        compiled(nn.Linear(64, 64), eager_backend("mxfp8", keep_high="ends"))(batch())


def test_a_batch_of_weights_is_rounded_too() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.weight)

    model, x = Experts(), batch()
    out = compiled(model, eager_backend(recipe(**EVERY)))(x)
    wanted = torch.stack(
        [along_last(a, "mxfp8") @ along_rows(w, "mxfp8") for a, w in zip(x, model.weight, strict=True)]
    )
    torch.testing.assert_close(out, wanted)


def test_sizes_that_no_block_fits_are_left_and_the_user_is_told() -> None:
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 8))
    found = ran(model, recipe="mxfp8")
    first, last = found.work.in_blocks
    assert (first.formats, first.why) == ((first.forward, first.weight_grad), "")
    assert last.forward is None
    assert last.weight_grad is not None
    assert last.why == f"forward: 40 is no multiple of 32, which blocks of {MXFP8} need"
    (notice,) = found.work.notices
    assert notice.site.startswith("addmm_1 (1")
    with pytest.warns(FxprecWarning, match="40 is no multiple of 32"):
        compiled(model, eager_backend("mxfp8"))(batch())
    with pytest.raises(FallbackError, match="40 is no multiple of 32"):
        compiled(model, eager_backend("mxfp8", strict=True))(batch())


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
    said = "gradients' products turned 32 elements at a time, with scales by MS-EDEN)"
    assert found.work.remarks[-1].endswith(said)


def test_sizes_that_no_turned_vector_fits_are_left_and_the_user_is_told() -> None:
    first, last = ran(recipe=recipe(**{**NVFP4_EDEN, "eden": 64})).work.in_blocks
    assert (len(first.formats), first.why) == (2, ""), "64 tokens; no gradient of the input"
    assert last.why == "input_grad: 32 is no multiple of 64, which a Hadamard matrix of that size needs"


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


def test_without_operands_nothing_changes() -> None:
    found = ran(recipe="bf16")
    assert found.is_unchanged()
    assert found.work.in_blocks == ()


def test_operands_decoded_in_forward_are_none_of_backwards_copies() -> None:
    found = run_pass("choose-crossings", layers(), batch(), recipe="mxfp8", low_ratio=None)
    step = Step(found.work.joint)
    operands = {x for x in found.nodes(Dequantize.target) if not is_backward(x) and x in step.needed}
    assert len(operands) == 4
    assert operands <= set(step.forward)
    assert not step.decoded & step.needed


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


def test_the_recipe_of_nvfp4_is_the_papers() -> None:
    asked = NVFP4.operands
    assert asked is not None
    assert (asked.square_weights, asked.hadamard, asked.stochastic) == (True, True, True)


def test_compiled_kernels_round_as_the_reference_does() -> None:
    """Without random numbers, which Inductor draws otherwise, and without GELU, whose last place it computes otherwise."""
    (first, _, last), x = layers(), batch()
    model = nn.Sequential(first, last)
    plain = recipe(forward="nvfp4", input_grad="mxfp8", weight_grad="nvfp4", square_weights=True)
    wanted, exact = trained(eager_backend(plain), model, x)
    out, found = trained(eager_backend(plain, lowering="auto"), model, x)
    assert torch.equal(out, wanted)
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-6, atol=2e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("asked", ["nvfp4", recipe(**NVFP4_EDEN)], ids=["nvfp4", "eden"])
def test_a_compiled_step_turns_and_rounds_at_random(asked: Any) -> None:
    model, x = layers(), batch()
    _, exact = trained(eager_backend("bf16"), model, x)
    _, found = trained(eager_backend(asked, lowering="auto"), model, x)
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() < 0.4 * gradient.norm(), name


SCHEDULED = recipe(**dict.fromkeys(EVERY, "nvfp4"), high_after=2)


@pytest.mark.parametrize("storage", ["native", "simulate"])
def test_after_the_steps_asked_for_operands_are_high(storage: str) -> None:
    model, x = layers(), batch()
    exact = trained(eager_backend(recipe(forward="nvfp4"), storage=storage, keep_high=("0", "2")), model, x)
    backend = eager_backend(SCHEDULED, storage=storage)
    step = compiled(model, backend)
    for i in range(4):
        out = step(x)
        (out * torch.arange(32.0)).square().mean().backward()
        found = gradients(model)
        is_exact = torch.equal(out, exact[0]) and all(torch.equal(found[name], g) for name, g in exact[1].items())
        assert is_exact == (i >= 2)
    assert [gemm.operands_why for gemm in backend.plans[0].gemms] == ["after step 2"] * 2
    (event,) = [event for event in backend.events if event.kind == "relowering"]
    assert event.detail.endswith("for operands in fp32 after step 2")
    assert event.step == 3
    assert "GEMM 1 multiplies operands in fp32: after step 2" in lines_about(backend, "addmm_1")
    with torch.no_grad():
        model.eval()
        assert torch.equal(step(x), exact[0]), "evaluation rounds as training does"


@pytest.mark.parametrize("steps", [1, 3])
def test_a_resumed_run_goes_on_as_it_would_have(steps: int) -> None:
    steps_of: dict[fxprec.Backend, Any] = {}
    model = layers()

    def one(backend: fxprec.Backend) -> Tensor:
        steps_of[backend](batch()).square().mean().backward()
        return gradients(model)["2.weight"]

    def run(backend: fxprec.Backend, first: int, last: int) -> list[Tensor]:
        steps_of[backend] = compiled(model, backend)
        return [one(backend) for _ in range(first, last)]

    whole = run(eager_backend(SCHEDULED), 0, 5)
    before = eager_backend(SCHEDULED)
    assert all(map(torch.equal, run(before, 0, steps), whole))
    after = eager_backend(SCHEDULED)
    after.load_state_dict(before.state_dict())
    resumed = run(after, steps, 5)
    assert all(map(torch.equal, resumed, whole[steps:]))
    assert not torch.equal(whole[0], whole[-1])
    assert [gemm.operands_why for gemm in after.plans[0].gemms] == ["after step 2"] * 2
    if steps == 1:  # a state of before, in a run that is beyond
        after.load_state_dict(before.state_dict())
        assert torch.equal(one(after), whole[1])


def test_where_compiling_with_high_operands_fails_training_goes_on_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, backend = layers(), eager_backend(SCHEDULED)
    step = compiled(model, backend)
    step(batch()).sum().backward()

    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(Plan, "with_high_operands", fail)
    step(batch()).sum().backward()
    with pytest.warns(FxprecWarning, match="stay in blocks: compiling them in fp32 failed .*no compiler here"):
        step(batch()).sum().backward()
    step(batch()).sum().backward()  # and is not told again
    assert [gemm.forward for gemm in backend.plans[0].gemms] == ["nvfp4"] * 2
