"""Pass smooth-swiglu: channels of silu(g) * u far above the median are scaled by powers of two, and their weights back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_bits_equal, compiled, eager_backend, gradients
from one_pass import run_pass
from torch import Tensor, nn

import fxprec
from fxprec import Recipe
from fxprec.config.recipes import BF16, FP8, NVFP4
from fxprec.errors import FallbackError, FxprecWarning

NAME, PLANTED = "smooth-swiglu", 5
FP32 = Recipe(name="float32 as high", hi="fp32", lo_forward="bf16", lo_backward="bf16")
aten = torch.ops.aten


class SwiGLU(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64, bias=bias), nn.Linear(32, 64, bias=bias)
        self.down = nn.Linear(64, 32, bias=bias)

    def hidden(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


class Written(SwiGLU):
    """Without a view of the weight, and the product's factors the other way."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x).flatten(0, 1) @ self.down.weight.T.contiguous()


class Read(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return self.down(hidden) + hidden.sum()


class Gelu(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x)) * self.up(x))


def planted(kind: type[SwiGLU] = SwiGLU, **options: Any) -> SwiGLU:
    """One channel's weights are aligned: its product reaches 2,254 where others reach 1 to 3."""
    torch.manual_seed(0)
    model = kind(**options)
    with torch.no_grad():
        model.gate.weight[PLANTED] *= 30
        model.up.weight[PLANTED] = model.gate.weight[PLANTED]
        model.down.weight[:, PLANTED] /= 8
    return model


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(seed))


def step(
    model: nn.Module, backend: fxprec.Backend, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, dict[str, Any]]:
    out = compiled(model, backend)(batch().to(dtype))
    (out - batch(2).to(dtype).view_as(out)).square().mean().backward()
    return out.detach(), gradients(model)


def smooth(recipe: Recipe, *, on: bool = True) -> Recipe:
    return replace(recipe, smooth_swiglu=on)


@pytest.mark.parametrize("kind", [SwiGLU, Written])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_no_bit_changes_in_formats_with_float32s_range(kind: type[SwiGLU], dtype: torch.dtype, bias: bool) -> None:
    model = planted(kind, bias=bias).to(dtype)
    recipe = FP32 if dtype == torch.float32 else BF16
    wanted, exact = step(model, eager_backend(recipe), dtype)
    backend = eager_backend(smooth(recipe))
    out, found = step(model, backend, dtype)
    assert any(note.startswith("smooth-swiglu: channels far above the median") for note in backend.plans[0].notes)
    assert_bits_equal(out, wanted)
    for name, gradient in exact.items():
        assert_bits_equal(found[name], gradient, name)


def test_the_scaled_product_is_the_tensor_of_the_plan_and_no_other_is_new() -> None:
    plain, found = (
        run_pass("group-tensors", planted(), batch(), recipe=smooth(FP8, on=on), low_ratio=1.0).work.grouped.tensors
        for on in (False, True)
    )
    assert [t.elements for t in plain] == [t.elements for t in found]
    renamed = {(a.name, b.name) for a, b in zip(plain, found, strict=True) if a.name != b.name}
    assert renamed == {("mul", "mul_tensor")}


def test_fp8_simulated_overflows_without_and_not_with_it() -> None:
    """Everything is rounded to e4m3fn, which ends at 448: the planted channel is 2,254."""
    model = planted()
    losses, ratios, errors = {}, {}, {}
    exact = step(model, eager_backend("bf16"))[1]
    for name, recipe in {"bf16": BF16, "without": FP8, "with": smooth(FP8)}.items():
        backend = eager_backend(recipe, storage="simulate", low_ratio=None if recipe is BF16 else 1.0)
        out, found = step(model, backend)
        losses[name] = float((out - batch(2)).square().mean())
        errors[name] = float((found["down.weight"] - exact["down.weight"]).norm() / exact["down.weight"].norm())
        ratios[name] = max((row["overflow_ratio"] or 0.0 for row in backend.stats()), default=0.0)
    assert ratios["without"] > 0
    assert ratios["with"] == 0
    assert losses["without"] < 0.5 * losses["bf16"], "the channel was most of the loss, and is cut off"
    assert losses["with"] == pytest.approx(losses["bf16"], rel=0.03)
    assert errors["without"] > 0.5
    assert errors["with"] < 0.1


def test_native_storage_recomputes_the_product_from_its_factors_and_keeps_the_weights_gradient() -> None:
    """So the planted channel ends in no 8-bit copy, with the pass or without."""
    model = planted()
    _, exact = step(model, eager_backend("bf16"))
    error = {}
    for on in (False, True):
        _, found = step(model, eager_backend(smooth(FP8, on=on), low_ratio=1.0))
        error[on] = float((found["down.weight"] - exact["down.weight"]).norm() / exact["down.weight"].norm())
    assert error[False] < 0.005
    assert error[True] < 0.005


@pytest.mark.parametrize("storage", ["native", "simulate"])
def test_a_channel_takes_no_block_from_its_neighbours(storage: str) -> None:
    """In forward alone, blocks of 16 channels: fifteen share a scale with the planted one."""
    recipe = replace(NVFP4, operands=fxprec.Operands(forward="nvfp4"))
    model = planted()
    _, exact = step(model, eager_backend("bf16"))
    error = {}
    for on in (False, True):
        backend = eager_backend(smooth(recipe, on=on), storage=storage)
        _, found = step(model, backend)
        assert [gemm.forward for gemm in backend.plans[0].gemms] == ["nvfp4"] * 3, "a scaled weight is a weight"
        error[on] = float((found["down.weight"] - exact["down.weight"]).norm() / exact["down.weight"].norm())
    assert error[False] > 3 * error[True], error


def test_a_training_goes_as_in_bf16_and_without_it_does_not() -> None:
    """To a teacher with another down projection, everything rounded for every reader."""
    teacher = planted().requires_grad_(False)
    teacher.down.weight.add_(0.05 * torch.randn(32, 64, generator=torch.Generator().manual_seed(3)))

    def loss_of(recipe: Recipe) -> float:
        model = planted()
        options = {"storage": "simulate", "low_ratio": 1.0 if recipe.has_low else None}
        train, optimizer = compiled(model, eager_backend(recipe, **options)), torch.optim.Adam(model.parameters())
        found = []
        for i in range(60):
            loss = (train(batch(i)) - teacher(batch(i))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return sum(found[-10:]) / 10

    wanted, without, found = (loss_of(recipe) for recipe in (BF16, FP8, smooth(FP8)))
    assert found == pytest.approx(wanted, rel=0.03)
    assert without > 2 * wanted


@pytest.mark.parametrize("kind", [Read, Gelu])
def test_other_products_are_left_and_the_user_is_told(kind: type[SwiGLU]) -> None:
    ran = run_pass(NAME, planted(kind), batch(), recipe=smooth(FP8))
    assert ran.is_unchanged()
    (notice,) = ran.work.notices
    assert "finds no silu(g) * u here that linear layers alone read" in notice.detail
    with pytest.warns(FxprecWarning, match="finds no silu"):
        compiled(planted(kind), eager_backend(smooth(FP8)))(batch())
    with pytest.raises(FallbackError, match="finds no silu"):
        compiled(planted(kind), eager_backend(smooth(FP8), strict=True))(batch())


def test_without_the_flag_nothing_changes() -> None:
    assert run_pass(NAME, planted(), batch(), recipe=FP8).is_unchanged()


def test_a_plan_keeps_the_flag(tmp_path: Any) -> None:
    backend = eager_backend(smooth(FP8), low_ratio=1.0)
    step(planted(), backend)
    backend.plans[0].save(tmp_path / "plan.json")
    assert fxprec.Plan.load(tmp_path / "plan.json").recipe.smooth_swiglu
    again = eager_backend(smooth(FP8), plan=tmp_path / "plan.json")
    step(planted(), again)
    assert again.plans[0].sites == backend.plans[0].sites


def test_compiled_kernels_scale_as_the_reference_does() -> None:
    model = planted()
    wanted, exact = step(model, eager_backend(smooth(FP8), low_ratio=1.0))
    out, found = step(model, eager_backend(smooth(FP8), low_ratio=1.0, lowering="auto"))
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() < 0.03 * gradient.norm(), name
