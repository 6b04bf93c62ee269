"""Option ``gradients="bf16"``: backward sums gradients in bfloat16 until ``optimizer.step()`` applies them."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks.memory.measure import peak_bytes
from fxprec.errors import BudgetError, ConfigError, FxprecWarning, GradientError
from fxprec.plan.explain import explain
from fxprec.report.whole_step import at_the_peak
from fxprec.runtime.optim.sums import SummedGradient

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (fxprec.optim.SGD, {"lr": 0.1, "update": "nearest"}),
    "sgd, momentum in 4 bits": (fxprec.optim.SGD, {"lr": 0.1, "momentum": 0.75, "states": "4bit"}),
    "adamw": (fxprec.optim.AdamW, {"lr": 1e-2}),
    "adamw, clipped": (fxprec.optim.AdamW, {"lr": 1e-2, "max_norm": 0.02, "states": "8bit"}),
    "adamw, format": (fxprec.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "format": "bf16", "update": "kahan"}),
    "lion": (fxprec.optim.Lion, {"lr": 1e-2}),
    "muon": (fxprec.optim.Muon, {"lr": 1e-2}),
}
PASSES = 3


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33, bias=False), nn.GELU(), nn.Linear(33, 8, bias=False)).to(dtype)


def compiled(model: nn.Module, optimizer: object, **options: Any) -> Any:
    given = {"recipe": "fp8", "lowering": "eager", "optimizer": optimizer, **options}
    return torch.compile(model, backend="fxprec", options=given)


def backward(run: Any, step: int, passes: int = PASSES, dtype: torch.dtype = torch.float32) -> None:
    for i in range(passes):
        g = torch.Generator().manual_seed(100 * step + i)
        run(torch.randn(8, 16, generator=g).to(dtype)).float().square().mean().backward()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_has_the_bits_of_one_with_that_sum_at_p_grad(name: str, dtype: torch.dtype) -> None:
    make, own = OPTIMIZERS[name]
    own = {**own, "seed": 3} | ({"betas": (0.9, 0.95)} if "adamw" in name else {})
    model = network(dtype)
    other = copy.deepcopy(model)
    ours, theirs = make(model.parameters(), gradients="bf16", **own), make(other.parameters(), **own)
    run = compiled(model, ours)
    for step in range(4):
        backward(run, step, dtype=dtype)
        assert all(isinstance(p.grad, SummedGradient) and p.grad.count == PASSES for p in model.parameters())
        for p, held in zip(other.parameters(), grads(model), strict=True):
            assert type(held) is Tensor
            p.grad = held
        ours.step()
        theirs.step()
        assert all(map(torch.equal, model.parameters(), other.parameters()))
        ours.zero_grad()
        ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    found, wanted = (optimizer.state_dict()["state"] for optimizer in (ours, theirs))
    for a, b in zip(found.values(), wanted.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in b if isinstance(b[key], Tensor))


@pytest.mark.parametrize("foreach", [None, False])
def test_what_is_held_is_the_sum_rounded_to_one_of_its_neighbours_each_time(foreach: bool | None) -> None:
    model = network()
    optimizer = fxprec.optim.SGD(model.parameters(), gradients="bf16", foreach=foreach)
    run, plain = compiled(model, optimizer), network()
    reference = torch.compile(plain, backend="fxprec", options={"recipe": "fp8", "lowering": "eager"})
    held = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(6):
        backward(run, i, 1)
        backward(reference, i, 1)
        for before, after, gradient in zip(held, grads(model), grads(plain), strict=True):
            exact = before.double() + gradient.double()
            unit = torch.exp2(torch.floor(torch.log2(exact.abs())) - 7)
            assert ((after.double() - exact).abs() < unit * (1 + 1e-6)).all()
            assert torch.equal(after, after.bfloat16().float())
        held = grads(model)
        plain.zero_grad()


def test_sums_of_many_small_gradients_are_right_in_the_mean() -> None:
    """1 + 256 times 1/1,024, 4,096 elements: rounding to nearest would stay at 1."""
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = fxprec.optim.SGD([parameter], gradients="bf16")
    optimizer.add_gradient(parameter, torch.ones(4096))
    for _ in range(256):
        optimizer.add_gradient(parameter, torch.full((4096,), 2.0**-10))
    assert isinstance(parameter.grad, SummedGradient)
    found = parameter.grad.held.double()
    error = found.std() / 64
    assert error > 0
    assert abs(found.mean() - 1.25) < 3 * error
    assert len(found.unique()) > 10, "elements have random bits of their own"


def test_random_bits_differ_by_pass_by_step_and_by_parameter_and_repeat_by_seed() -> None:
    def held(seed: int, steps: int = 0, passes: int = 1, index: int = 0) -> Tensor:
        both = [nn.Parameter(torch.zeros(512)) for _ in range(2)]
        optimizer = fxprec.optim.SGD(both, lr=0.0, update="nearest", gradients="bf16", seed=seed)
        for _ in range(steps):
            both[index].grad = torch.zeros(512)
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(passes - 1):
            optimizer.add_gradient(both[index], torch.zeros(512))
        optimizer.add_gradient(both[index], torch.full((512,), 1 + 2.0**-9))
        assert isinstance(both[index].grad, SummedGradient)
        return both[index].grad.held

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = held(1)
        assert torch.equal(first, held(1))
        others = [held(2), held(1, steps=1), held(1, passes=2), held(1, index=1)]
    found = [first, *others]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert all(set(t.tolist()) == {1.0, 1 + 2.0**-7} for t in found)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=0, max_size=3), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_shapes_strides_and_dtypes(shape: list[int], is_permuted: bool, dtype: torch.dtype) -> None:
    """Gradients that bf16 holds are summed exactly; the first is what is held."""
    t = torch.zeros(shape, dtype=dtype)
    parameter = nn.Parameter(t.permute(tuple(reversed(range(t.dim())))) if is_permuted else t)
    optimizer = fxprec.optim.SGD([parameter], lr=1.0, gradients="bf16")
    gradient = torch.randn(parameter.shape).bfloat16().to(dtype)
    optimizer.add_gradient(parameter, gradient)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad.clone(), gradient)
    assert parameter.grad.dtype == dtype
    assert parameter.grad.stride() == parameter.stride()
    optimizer.step()
    assert torch.equal(parameter.detach(), -gradient)


def test_what_reads_and_writes_p_grad_sees_a_tensor_of_the_parameters_dtype() -> None:
    model = network()
    run = compiled(model, fxprec.optim.SGD(model.parameters(), gradients="bf16"))
    backward(run, 0)
    before = grads(model)
    norm = torch.stack([g.double().norm() for g in before]).norm()
    assert torch.allclose(nn.utils.clip_grad_norm_(model.parameters(), 0.5 * float(norm)).double(), norm)
    for old, new in zip(before, grads(model), strict=True):
        assert torch.allclose(new, 0.5 * old, rtol=2**-8, atol=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = fxprec.optim.SGD(model.parameters(), gradients="bf16")
    scaler.scale(torch.ones(()))
    held = grads(model)
    scaler.unscale_(optimizer)
    assert all(torch.equal(new, old / 4) for old, new in zip(held, grads(model), strict=True))
    weight = next(model.parameters())
    assert weight.grad is not None
    assert torch.equal(copy.deepcopy(weight.grad).clone(), weight.grad.clone())
    before = weight.grad.clone()
    weight.grad[1:3].mul_(2)
    weight.grad.data.view(-1)[:4].zero_()
    assert torch.equal(weight.grad[1:3], 2 * before[1:3])
    assert torch.equal(weight.grad[3:], before[3:])
    assert torch.equal(weight.grad[0].clone(), torch.cat([torch.zeros(4), before[0, 4:]]))
    assert weight.grad.view(torch.int32).dtype == torch.int32
    optimizer.zero_grad(set_to_none=False)
    assert isinstance(weight.grad, SummedGradient)
    assert not weight.grad.held.any()


def test_clipping_by_this_steps_norm_is_torchs_on_the_same_sums() -> None:
    most, model = 0.02, network()
    other = copy.deepcopy(model)
    ours = fxprec.optim.SGD(model.parameters(), lr=0.1, update="nearest", max_norm=most, gradients="bf16")
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    run = compiled(model, ours)
    for step in range(3):
        backward(run, step)
        for p, held in zip(other.parameters(), grads(model), strict=True):
            p.grad = held
        norm = nn.utils.clip_grad_norm_(other.parameters(), most)
        assert norm > most
        ours.step()
        theirs.step()
        ours.zero_grad()
        last = ours.last_norm()
        assert last is not None
        assert math.isclose(last, norm, rel_tol=1e-6)
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_error_if_nonfinite_looks_at_sums() -> None:
    model = network()
    optimizer = fxprec.optim.SGD(model.parameters(), gradients="bf16", error_if_nonfinite=True)
    run = compiled(model, optimizer)
    backward(run, 0)
    run(torch.full((1, 16), torch.inf)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(GradientError, match="inf or NaN"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_gradient_that_stood_there_is_added_to_as_it_is() -> None:
    model = network()
    run = compiled(model, fxprec.optim.SGD(model.parameters(), gradients="bf16"))
    weight = next(model.parameters())
    weight.grad = torch.zeros_like(weight)
    backward(run, 0)
    assert type(weight.grad) is Tensor
    assert weight.grad.any()


def test_without_a_compiled_model_it_says_that_nothing_is_summed_in_bf16() -> None:
    model = network()
    optimizer = fxprec.optim.SGD(model.named_parameters(), gradients="bf16")
    model(torch.ones(2, 16)).sum().backward()
    with pytest.warns(FxprecWarning, match=r"gradients='bf16' of group 0 holds none in bf16.*'0\.weight'.*float32"):
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "gradients", "words"),
    [
        (torch.float32, "8bit", r"unknown gradients of group 0 '8bit'; allowed: 'bf16', or None"),
        (torch.float16, "bf16", r"parameter 0 of group 0 is float16, .* drop gradients='bf16'"),
    ],
)
def test_what_is_refused(dtype: torch.dtype, gradients: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fxprec.optim.SGD([nn.Parameter(torch.ones(2, dtype=dtype))], gradients=gradients)


WIDTH, LAYERS = 512, 8
WEIGHT = WIDTH * WIDTH * 4


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def test_a_step_budget_counts_the_sums() -> None:
    model = wide()
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="8bit", gradients="bf16")
    assert optimizer.gradient_bytes() == LAYERS * WEIGHT // 2
    room = 3 * WEIGHT
    budget = LAYERS * WEIGHT + optimizer.state_bytes() + optimizer.gradient_bytes() + room
    run = compiled(model, optimizer, step_budget=budget)
    run(torch.ones(8, WIDTH)).sum().backward()
    (plan,) = fxprec.backend_of(run).plans
    assert plan.peak_bytes is not None
    assert plan.whole_step is not None
    assert plan.peak_bytes.budget == room
    assert plan.whole_step.gradients == optimizer.gradient_bytes()
    assert at_the_peak(plan.whole_step, plan.peak_bytes)["gradients"] >= optimizer.gradient_bytes()
    assert f"  gradients, summed in bf16, take {optimizer.gradient_bytes():,}" in explain(plan, "step_budget")
    torch._dynamo.reset()
    other = fxprec.optim.AdamW(model.parameters(), lr=1e-3, states="8bit", gradients="bf16")
    with pytest.raises(BudgetError, match=r"optimizer states 4\.\d+ MiB \(\d+ bytes\), gradients in bf16 4\.00 MiB"):
        compiled(model, other, step_budget=budget - room)(torch.ones(8, WIDTH)).sum().backward()


@pytest.mark.inductor
def test_the_peak_over_several_passes_falls_by_half_of_the_gradients() -> None:
    def peak(gradients: Any) -> int:
        torch._dynamo.reset()
        model = wide()
        optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3, gradients=gradients)
        given = {"optimizer": optimizer} if gradients else {}
        run = torch.compile(model, backend="fxprec", options={"recipe": "bf16", **given})

        def step() -> None:
            for _ in range(PASSES):
                run(torch.ones(8, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            step()
        return peak_bytes(profiled)

    plain, summed = peak(None), peak("bf16")
    assert plain > LAYERS * WEIGHT
    assert summed < 0.5 * LAYERS * WEIGHT + 3.1 * WEIGHT
