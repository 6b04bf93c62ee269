"""What is saved in block formats of fewer than 8 bits: where, how large, and without bias in gradients."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers import recorded_works
from models import Residual, SelfAttention
from torch import Tensor, nn

import fxprec
from fxprec import Backend, Config, Plan, Recipe
from fxprec.config.recipes import find_recipe
from fxprec.errors import ConfigError, FxprecWarning, PlanError
from fxprec.numerics import blocks
from fxprec.passes.analysis.block_copies import ATTENDED
from fxprec.passes.analysis.saved_bytes import read_by_backward
from fxprec.passes.choose_crossings import WHY_RECOMPUTED
from fxprec.plan import Site
from fxprec.plan.explain import explain

ROWS = 4 * 64


class Net(nn.Module):
    """Of what backward reads some only makes weight gradients: a GELU's result, a sum, the input of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.conv, self.again, self.out = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, padding=2), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.back(torch.nn.functional.gelu(self.wide(self.norm(x))))
        image = torch.sin(x).view(4, 8, 8, 32).contiguous(memory_format=torch.channels_last)
        return self.out(torch.relu(self.again(self.conv(image))))


def step(recipe: str | Recipe, model: nn.Module | None = None, **options: Any) -> tuple[Backend, list[Tensor], Tensor]:
    """Train one step from the same weights; return the backend, the gradients and the loss."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Net() if model is None else copy.deepcopy(model)
    x = torch.randn(4, 64, 32)
    backend = Backend(Config(**{"recipe": recipe, "low_ratio": 1.0, "lowering": "eager"} | options))
    loss = torch.compile(model, backend=backend)(x).square().mean()
    loss.backward()
    return backend, [p.grad for p in model.parameters()], loss.detach()


@cache
def planned(recipe: str) -> tuple[Plan, list[Tensor], Tensor]:
    backend, gradients, loss = step(recipe)
    return backend.plans[0], gradients, loss


def by_name(plan: Plan) -> dict[str, Site]:
    return {site.tensor: site for site in plan.sites if site.kind == "output"}


def test_only_what_bears_noise_has_few_bits():
    sites = by_name(planned("fp8+int4")[0])
    assert {name: s.shape for name, s in sites.items() if s.saved_as == "int4"} == {
        "x": "4 x 64 x 32",  # less its mean: no gradient is wanted of the input, so its norm only makes its weight's
        "sin": "4 x 64 x 32",  # into the first convolution, which reads it channels last
        "convolution": "4 x 8 x 6 x 30",  # into the second, channels last itself
        "relu": "4 x 8 x 8 x 32",  # its sign has a bit of its own
    }
    assert {s.format for s in sites.values() if s.saved_as} == {"e4m3fn"}
    assert "recomputed in backward" in sites["mul_4"].why  # GELU's result, of its input
    whys = {s.why for s in sites.values() if s.reads == "backward" and not s.saved_as}
    assert any("the backward of aten.gelu reads it too" in why for why in whys), whys


def test_saved_bytes_count_codes_and_scales():
    plan = planned("fp8+int4")[0]
    saved = [s for s in plan.sites if s.reads == "backward"]
    in_blocks = [s.elements for s in saved if s.saved_as]
    whole = {"e4m3fn": 1, "bf16": 2}
    mask = by_name(plan)["relu"].elements
    planned_bytes = sum(map(blocks.INT4.num_bytes, in_blocks)) + mask // 8
    planned_bytes += sum(s.elements * whole[s.format] for s in saved if not s.saved_as)
    planned_bytes += 4 * ROWS  # the norm's statistic
    assert plan.saved_bytes.planned == planned_bytes
    assert plan.saved_bytes.fp32 == 4 * (sum(s.elements for s in saved) + ROWS) + mask
    assert sum(g.saved_elements for g in plan.groups) == sum(s.elements for s in saved) + ROWS
    assert sum(g.saved_bytes for g in plan.groups) == plan.saved_bytes.planned


def test_no_copy_is_saved_of_what_takes_less_to_compute_again():
    """The input of the first convolution, of what the sine's backward reads; the GEMM reads it in another layout."""
    plan = planned("fp8")[0]
    (site,) = [s for s in plan.sites if s.tensor == "sin" and s.kind == "output"]
    assert (site.format, site.reads, site.why) == ("bf16", "all", WHY_RECOMPUTED)
    saved = [s for s in plan.sites if s.group == site.group and s.reads == "backward"]
    group = next(g for g in plan.groups if g.id == site.group)
    assert group.saved_bytes == sum(s.elements * (1 if s.format == "e4m3fn" else 2) for s in saved)


@pytest.mark.parametrize("name", ["int8", "int4", "mxfp8", "mxfp6", "nvfp4"])
def test_gradients_have_the_formats_error_and_forward_none(name: str):
    _, exact, loss = planned("fp8")
    _, found, same = planned(f"fp8+{name}")
    assert torch.equal(loss, same)
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
    assert worst < {"int8": 0.06, "mxfp8": 0.06, "mxfp6": 0.06}.get(name, 0.25)
    assert worst > 0


def test_eight_bits_go_wherever_backward_reads():
    sites = by_name(planned("fp8+int8")[0])
    low = [s for s in sites.values() if s.reads == "backward" and s.format == "e4m3fn"]
    assert {s.saved_as for s in low} == {"int8"}


def test_what_backward_reads_in_blocks_counts_by_its_blocks():
    model, read = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)), {}
    for recipe in ("fp8", "fp8+int8"):
        with recorded_works() as works:
            step(recipe, model)
        read[recipe] = read_by_backward(works[0].joint)
    assert read["fp8"] < read["fp8+int8"] < 1.02 * read["fp8"]


def test_the_seed_is_drawn_before_all_that_it_rounds():
    """Of two inputs the second one's copy comes first in the graph."""
    first, second = nn.Linear(32, 64), nn.Linear(32, 64)
    backend = Backend(Config(recipe="fp8+int4", low_ratio=1.0, lowering="eager"))
    torch.compile(lambda x, y: first(x) + second(y), backend=backend)(
        torch.randn(64, 32), torch.randn(64, 32)
    ).sum().backward()
    assert [site.saved_as for site in backend.plans[0].sites if site.saved_as] == ["int4", "int4"]


def test_a_relus_sign_is_a_bit_of_its_own_and_exact():
    layers = (nn.Linear(32, 64), nn.ReLU(), Residual(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 8))
    model = nn.Sequential(nn.Flatten(0, 1), *layers)
    (plain, exact, _), (backend, found, _) = step("fp8", model), step("fp8+int4", model)
    sites = by_name(backend.plans[0])
    assert {sites[n].saved_as for n in ("relu", "add")} == {"int4"}
    masks = [row.bytes for row in backend.plans[0].saved if row.format == "bit"]
    assert masks == 2 * [4 * 64 * 64 // 8]
    assert all(map(torch.equal, found[1::2], exact[1::2]))  # of biases: masked gradients, added up
    saved, before = backend.plans[0].saved_bytes, plain.plans[0].saved_bytes
    assert by_name(plain.plans[0])["add"].format == "e4m3fn", "of its second operand only a bit is kept"
    elements = 4 * 64 * 64
    assert before.planned == 4 * 64 * 32 + 2 * elements + elements // 8
    assert saved.planned == blocks.INT4.num_bytes(4 * 64 * 32) + 2 * blocks.INT4.num_bytes(elements) + 2 * elements // 8


def test_weight_gradients_have_no_bias():
    """Over 1,000 draws of 2 bits the mean is the gradient itself; nearest rounding is off by 30 standard errors."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(32, 16).exp()
    backend = Backend(Config(recipe="fp8+int2/32:bf16", low_ratio=1.0, lowering="eager"))
    compiled, draws, hidden = torch.compile(model, backend=backend), [], model[0](x).detach()
    exact = 2 * model[1](hidden).detach().T @ hidden
    for _ in range(1000):
        model.zero_grad()
        compiled(x).square().sum().backward()
        draws.append(model[1].weight.grad)
    assert {"addmm", "args.0"} == {s.tensor for s in backend.plans[0].sites if s.saved_as}
    found = torch.stack(draws)
    assert not torch.equal(found[0], found[1])
    deviation = found.std(0) / 1000**0.5
    assert ((found.mean(0) - exact).abs() <= 5 * deviation).all()
    nearest = 2 * model[1](hidden).detach().T @ fxprec.quantize(hidden, "int2/32:bf16")
    assert ((nearest - exact).abs() / deviation).median() > 10


def test_the_seed_is_torchs():
    (_, first, _), (_, second, _) = planned("fp8+int4"), step("fp8+int4")
    assert all(map(torch.equal, first, second))


def test_inf_spoils_its_block_and_shows(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    backend = Backend(Config(recipe="fp8+int4/64:bf16", low_ratio=1.0, lowering="eager"))
    compiled, x = torch.compile(model, backend=backend), torch.randn(32, 64)
    x[3, 5] = math.nan
    compiled(x)[4:].square().sum().backward()
    assert model[0].weight.grad.isnan().all()
    assert backend.plans[0].promoted == ()


def test_what_attention_reads_is_in_small_blocks_and_not_in_the_16_bits_of_its_gemm():
    model = SelfAttention(32, 32, 8, causal=True)
    (plain, exact, _), (backend, found, _) = step("fp8", model), step("fp8+int4", model)
    (site,) = [s for s in backend.plans[0].sites if s.tensor == "addmm" and s.kind == "output"]
    assert (site.format, site.saved_as) == ("bf16", ATTENDED.name)
    saved, before = backend.plans[0].saved_bytes, plain.plans[0].saved_bytes
    assert before.planned - saved.planned >= 2 * site.elements - ATTENDED.num_bytes(site.elements)
    assert float((found[1] - exact[1]).norm() / exact[1].norm()) < 0.02  # of the bias: no int4 is in it


def test_a_plan_file_keeps_it_and_can_be_edited(tmp_path):
    plan = planned("fp8+int4")[0]
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert any("stored in int4, 4.125 bits an element" in line for line in explain(plan, "convolution"))
    assert any("holds a low output in e4m3fn; int4 cannot hold it" in line for line in explain(plan, "addmm"))
    wanted = {"convolution": "int2", "sin": "", "addmm": "int4"}
    edited = [replace(s, saved_as=wanted.get(s.tensor, s.saved_as)) if s.kind == "output" else s for s in plan.sites]
    replace(plan, sites=tuple(edited)).save(tmp_path / "edited.json")
    with pytest.warns(FxprecWarning, match="of the given plan is 'int4', and it stays in e4m3fn: the backward of"):
        backend, *_ = step("fp8", low_ratio=None, plan=tmp_path / "edited.json")
    found = by_name(backend.plans[0])
    assert {name: s.saved_as for name, s in found.items() if s.saved_as} == {
        "x": "int4",
        "convolution": "int2",
        "relu": "int4",
    }
    text = (tmp_path / "plan.json").read_text().replace('"saved_as": "int4"', '"saved_as": "bf16"')
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(PlanError, match=r"saved_as: 'bf16' has no blocks; give a block format"):
        Plan.load(tmp_path / "wrong.json")


def test_a_plan_for_inference_cannot_have_a_copy_in_blocks(tmp_path):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).eval(), torch.randn(32, 64)

    def plan(**options: Any) -> Plan:
        torch._dynamo.reset()
        backend = Backend(Config(lowering="eager", **options))
        with torch.no_grad():
            torch.compile(model, backend=backend)(x)
        (found,) = backend.all_plans
        assert found is not None
        return found

    made = plan(recipe="fp8", low_ratio=1.0)
    first, *others = made.sites
    replace(made, sites=(replace(first, saved_as="int4"), *others)).save(tmp_path / "p.json")
    with pytest.warns(
        FxprecWarning,
        match=r"sites\[0\]\.saved_as of the given plan is 'int4', and it stays in \w+: no 8-bit copy of it is saved",
    ):
        assert plan(recipe="fp8", plan=tmp_path / "p.json").sites[0].saved_as == ""


def test_dynamic_shapes_stay_in_8_bits_and_say_so():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    backend = Backend(Config(recipe="fp8+int4", low_ratio=1.0, lowering="eager"))
    compiled = torch.compile(model, backend=backend, dynamic=True)
    compiled(torch.randn(32, 64)).sum().backward()
    assert any("is dynamic" in site.why for site in backend.plans[0].sites)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "fp8+int5/64:bf16"}, "use 1, 2, 4 or 8"),
        ({"recipe": "fp8+mxfp44"}, "recipe.saved: unknown format 'mxfp44'; did you mean 'mxfp4'?; block"),
        ({"recipe": "fp8+bf16"}, "recipe.saved: 'bf16' has no blocks; give a block format, such as 'mxfp4', 'int4'"),
        ({"recipe": "fp8+"}, "recipe 'fp8+' names no block format after '+'; write for instance 'fp8+"),
        (
            {"recipe": "bf16+int4"},
            "recipe.saved is int4, a format for copies of low tensors that only backward reads, and recipe "
            "'bf16+int4' has no low tensors; use it with fp8",
        ),
        ({"recipe": "hfp8+int4"}, "use storage='native' or storage='packed'"),
        ({"recipe": "fp8+int4", "storage": "simulate"}, "stores no copies"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as error:
        Config(**options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_says_what_is_saved():
    assert find_recipe("fp8+int4") == Recipe(
        name="fp8+int4", hi="bf16", lo_forward="e4m3fn", lo_backward="e5m2_sat", saved=blocks.INT4
    )
    assert find_recipe("fp8+int4").to_dict()["saved"] == "int4"
    with pytest.raises(
        ConfigError,
        match=r"recipe\.lo_forward is the block format 'mxfp4', which only saved copies can have; use saved=",
    ):
        Recipe(hi="bf16", lo_forward="mxfp4", lo_backward="e5m2")
    with pytest.raises(ConfigError, match="or its name, such as 'int4'"):
        Recipe(hi="bf16", lo_forward="e4m3fn", lo_backward="e5m2", saved=4)


@pytest.mark.inductor
def test_compiled_kernels_store_what_the_reference_stores():
    """With torch's own random numbers both lowerings draw the same seed; what differs is the GEMMs' order of sums."""
    with torch._inductor.config.patch(fallback_random=True):
        _, wanted, loss = step("fp8+int4")
        backend, found, same = step("fp8+int4", lowering="inductor")
    torch.testing.assert_close(same, loss, rtol=2e-2, atol=0)
    assert [s.saved_as for s in backend.plans[0].sites] == [s.saved_as for s in planned("fp8+int4")[0].sites]
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
    assert worst < 0.03  # other draws differ by 0.1
    assert not backend.events
