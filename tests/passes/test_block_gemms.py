"""Pass block-gemms: each product of a layer multiplies operands rounded along the dimension it sums over."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from blocks_by_hand import (
    EVERY,
    MXFP8,
    NVFP4_EDEN,
    along_last,
    along_rows,
    batch,
    by_hand,
    layers,
    lines_about,
    ran,
    recipe,
    trained,
)
from helpers import compiled, eager_backend, gradients, recorded_works
from models import Parts
from one_pass import run_pass
from torch import Tensor, nn

import fxprec
from fxprec import Plan
from fxprec.config.recipes import NVFP4
from fxprec.errors import FallbackError, FxprecWarning
from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.passes.analysis.joint import is_backward
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.block_gemms import KEPT_HIGH, TWO_VALUES

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
    said = (
        f"rounds its operands to blocks, {MXFP8} for its value, {MXFP8} for its input's gradient, {MXFP8} for its "
        "weight's"
    )
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
    assert ["forward" in found.formats for found in works[0].operand_formats] == [False, True]


def test_a_plan_without_operands_leaves_them_to_the_recipe(tmp_path: Any) -> None:
    model, x = layers(), batch()
    backend = eager_backend("bf16")
    trained(backend, model, x)
    backend.plans[0].save(tmp_path / "plan.json")
    with recorded_works() as works:
        trained(eager_backend("mxfp8", plan=tmp_path / "plan.json"), model, x)
    assert [len(found.formats) for found in works[0].operand_formats] == [2, 3]


def test_a_plan_with_operands_under_a_recipe_without_is_told(tmp_path: Any) -> None:
    model, x = layers(), batch()
    backend = eager_backend("mxfp8", keep_high=("2",))
    trained(backend, model, x)
    backend.plans[0].save(tmp_path / "plan.json")
    without = replace(backend.plans[0].recipe, name="mine", operands=None)
    with pytest.warns(FxprecWarning, match="rounds the operands of 1 GEMMs to blocks, and recipe 'mine' rounds none"):
        trained(eager_backend(without, plan=tmp_path / "plan.json"), model, x)
    again = eager_backend("mxfp8", plan=tmp_path / "plan.json")
    trained(again, model, x)
    assert [gemm.operands_why for gemm in again.plans[0].gemms] == ["", KEPT_HIGH]


def test_keep_high_holds_gemms_high() -> None:
    found = ran(recipe="nvfp4", keep_high=("2",)).work.operand_formats
    assert [len(of.formats) for of in found] == [2, 0]
    assert found[1].why == KEPT_HIGH
    backend = eager_backend("nvfp4", keep_high=("2",))
    trained(backend, layers(), batch())
    assert "GEMM 1 multiplies operands in bf16: as keep_high asks" in lines_about(backend, "addmm_1")
    assert all(not of.formats for of in ran(recipe="nvfp4", keep_high="ends").work.operand_formats), "first and last"


def test_products_of_two_values_stay_high() -> None:
    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return torch.softmax(y @ y.mT, -1) @ y

    first, *rest = ran(Attention(64, 64), recipe="mxfp8").work.operand_formats
    assert len(first.formats) == 2
    assert [of.why for of in rest] == [TWO_VALUES] * 2


def test_a_model_without_a_gemm_that_is_rounded_is_told() -> None:
    with pytest.warns(
        FxprecWarning, match="recipe 'mxfp8' rounds no GEMM's operands here; the first GEMM: aten.convolution"
    ):
        compiled(nn.Conv2d(2, 4, 3), eager_backend("mxfp8"))(batch().unsqueeze(0))


def test_a_model_whose_gemms_are_all_kept_high_is_told_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxprecWarning)
        compiled(nn.Linear(64, 64), eager_backend("mxfp8", keep_high="ends"))(batch())


def test_a_batch_of_weights_is_rounded_too() -> None:
    weight = nn.Parameter(torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)))
    model, x = Parts(lambda m, x: torch.bmm(x, m.weight), weight=weight), batch()
    out = compiled(model, eager_backend(recipe(**EVERY)))(x)
    wanted = torch.stack(
        [along_last(a, "mxfp8") @ along_rows(w, "mxfp8") for a, w in zip(x, model.weight, strict=True)]
    )
    torch.testing.assert_close(out, wanted)


def test_sizes_that_no_block_fits_are_left_and_the_user_is_told() -> None:
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 8))
    found = ran(model, recipe="mxfp8")
    first, last = found.work.operand_formats
    assert (set(first.formats), first.why) == ({"forward", "weight_grad"}, "")
    assert "forward" not in last.formats
    assert "weight_grad" in last.formats
    assert last.why == f"forward: 40 is not a multiple of 32, which blocks of {MXFP8} need"
    (notice,) = found.work.notices
    assert notice.site.startswith("addmm_1 (1")
    with pytest.warns(FxprecWarning, match="40 is not a multiple of 32"):
        compiled(model, eager_backend("mxfp8"))(batch())
    with pytest.raises(FallbackError, match="40 is not a multiple of 32"):
        compiled(model, eager_backend("mxfp8", strict=True))(batch())


def test_without_operands_nothing_changes() -> None:
    found = ran(recipe="bf16")
    assert found.is_unchanged()
    assert found.work.operand_formats == ()


def test_operands_decoded_in_forward_are_none_of_backwards_copies() -> None:
    found = run_pass("choose-crossings", layers(), batch(), recipe="mxfp8", low_ratio=None)
    step = Step(found.work.joint)
    operands = {x for x in found.nodes(Dequantize.target) if not is_backward(x) and x in step.needed}
    assert len(operands) == 4
    assert operands <= set(step.forward)
    assert not step.decoded & step.needed


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


IN_BLOCKS = recipe(**dict.fromkeys(EVERY, "nvfp4"))


def test_operands_are_high_from_the_step_on_in_which_a_function_says_so() -> None:
    model, x = layers(), batch()
    backend = eager_backend(IN_BLOCKS)
    step, rate, seen = compiled(model, backend), 0.1, []

    def is_late(number: int) -> bool:
        seen.append(number)
        return rate < 0.05

    backend.hold_operands_high(is_late)
    exact = trained(eager_backend(recipe(forward="nvfp4"), keep_high=("0", "2")), model, x)
    for i in range(4):
        rate *= 0.7
        out = step(x)
        out.sum().backward()
        assert torch.equal(out, exact[0]) == (i >= 1)
    assert seen == [1, 2]
    (event,) = [event for event in backend.events if event.kind == "relowering"]
    assert (event.step, event.detail.endswith("for operands in fp32 since step 2, as asked")) == (2, True)
    assert [gemm.operands_why for gemm in backend.plans[0].gemms] == ["since step 2, as asked"] * 2
    with torch.no_grad():
        model.eval()
        assert torch.equal(step(x), exact[0]), "evaluation rounds as training does"


def test_a_run_resumed_after_the_call_multiplies_high_operands() -> None:
    model, x = layers(), batch()
    backend = eager_backend(IN_BLOCKS)
    step = compiled(model, backend)
    step(x).sum().backward()
    backend.hold_operands_high()
    wanted = step(x)
    wanted.sum().backward()
    after = eager_backend(IN_BLOCKS)
    after.load_state_dict(backend.state_dict())
    assert torch.equal(compiled(model, after)(x), wanted)
    assert not torch.equal(compiled(model, eager_backend(IN_BLOCKS))(x), wanted)


def test_a_recipe_without_blocks_has_no_operands_to_hold_high() -> None:
    with pytest.raises(fxprec.ConfigError, match="recipe 'fp8' multiplies no operands in blocks"):
        fxprec.Backend(fxprec.Config(recipe="fp8")).hold_operands_high()


def test_where_compiling_with_high_operands_fails_training_goes_on_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, backend = layers(), eager_backend(SCHEDULED)
    step = compiled(model, backend)
    step(batch()).sum().backward()

    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("fxprec.driver.graph.compile_graph", fail)
    step(batch()).sum().backward()
    with pytest.warns(FxprecWarning, match="stay in blocks: compiling them in fp32 failed .*no compiler here"):
        step(batch()).sum().backward()
    step(batch()).sum().backward()  # and is not told again
    assert [gemm.forward for gemm in backend.plans[0].gemms] == ["nvfp4"] * 2
