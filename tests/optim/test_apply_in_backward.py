"""Option ``optimizer``: the compiled backward half steps parameters, bit for bit as ``optimizer.step()`` would."""

from __future__ import annotations

import copy
import io
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks.memory.measure import peak_bytes
from fxprec.demo.models import CharTransformer
from fxprec.errors import BudgetError, ConfigError, FxprecWarning, GradientError
from fxprec.passes.crossings.best_of import BestOf
from fxprec.runtime.optim.applied import AppliedGradient
from fxprec.runtime.optim.in_backward import InBackward, apply_update, stepping

OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sgd": (fxprec.optim.SGD, {"lr": 0.1, "momentum": 0.75, "nesterov": True}),
    "adamw": (fxprec.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95)}),
    "lion in 4 bits": (fxprec.optim.Lion, {"lr": 1e-2, "weight_decay": 0.1, "states": "4bit"}),
    "sgd, clipped": (fxprec.optim.SGD, {"lr": 0.1, "momentum": 0.75, "max_norm": 0.02, "norm": "last"}),
    "adamw in 8 bits": (fxprec.optim.AdamW, {"lr": 1e-2, "states": "8bit"}),
}


def small(dtype: torch.dtype = torch.float32, widths: tuple[int, ...] = (16, 32, 8)) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()]
    return nn.Sequential(*layers).to(dtype)


def compiled(model: nn.Module, optimizer: object = None, **options: Any) -> Any:
    given = {"recipe": "bf16", "lowering": "eager", **options}
    return torch.compile(model, backend="fxprec", options=given | ({"optimizer": optimizer} if optimizer else {}))


def trained(
    model: nn.Module, name: str, *, in_backward: bool, recipe: str = "fp8", lowering: str = "eager", **own: Any
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train for five steps, with a schedule and a state that is saved and loaded in the middle."""
    make, given_options = OPTIMIZERS[name]
    optimizer = make(model.parameters(), **given_options, **own)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run = compiled(model, optimizer if in_backward else None, recipe=recipe, lowering=lowering)
    width = next(model.parameters()).shape[1]
    torch.manual_seed(1)
    for step in range(5):
        run(torch.randn(8, width, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
        stepped = {isinstance(p.grad, AppliedGradient) for p in model.parameters()}
        assert stepped == {in_backward}
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


def same(name: str, model: Callable[[], nn.Module], **options: Any) -> None:
    ours, state = trained(model(), name, in_backward=True, **options)
    torch._dynamo.reset()
    wanted, wanted_state = trained(model(), name, in_backward=False, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    for key, values in wanted_state["state"].items():
        for entry, value in values.items():
            assert torch.equal(state["state"][key][entry], value), (key, entry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_the_step(name: str, update: str, dtype: torch.dtype) -> None:
    same(name, lambda: small(dtype), recipe="fp8" if update == "kahan" else "bf16", update=update, seed=3)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in OPTIMIZERS), ("adamw in 8 bits", torch.bfloat16)]
)
def test_bits_are_those_of_the_step_in_inductors_code(name: str, dtype: torch.dtype) -> None:
    same(name, lambda: small(dtype), lowering="inductor")


def test_each_thread_steps_its_own_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves run before either steps."""
    found: list[tuple[object, object]] = []
    monkeypatch.setattr(InBackward, "apply", lambda self, parameter, gradient: found.append((self, parameter)))
    both = threading.Barrier(2, timeout=20)

    def run() -> None:
        weight = nn.Parameter(torch.ones(2))
        mine = InBackward(fxprec.optim.SGD([weight]))
        with stepping(mine):
            both.wait()
            apply_update(weight, torch.ones(2))
            both.wait()
        wanted.append((mine, weight))

    wanted: list[tuple[object, object]] = []
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(id(a), id(b)) for a, b in found} == {(id(a), id(b)) for a, b in wanted}
    assert len(wanted) == 2


@settings(max_examples=4, deadline=None)
@given(
    st.lists(st.integers(2, 24), min_size=2, max_size=4),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(["fp8", "bf16"]),
)
def test_bits_are_those_of_the_step_for_any_model(widths: list[int], name: str, recipe: str) -> None:
    torch._dynamo.reset()
    same(name, lambda: small(widths=tuple(widths)), recipe=recipe)


def sgd(model: nn.Module) -> Any:
    return fxprec.optim.SGD(model.parameters(), lr=0.1)


def test_a_second_backward_before_the_step_is_refused() -> None:
    model = small()
    run = compiled(model, sgd(model))
    run(torch.ones(2, 16)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    loss = run(torch.ones(2, 16)).sum()
    with pytest.raises(
        GradientError, match=r"second backward before optimizer\.step\(\): the first has stepped 0\.weight"
    ):
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_backward_of_a_retained_graph_is_refused_the_second_time() -> None:
    model = small()
    loss = compiled(model, sgd(model))(torch.ones(2, 16)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(GradientError, match="second backward"):
        loss.backward()


def test_a_gradient_that_was_not_cleared_is_refused() -> None:
    model = small()
    optimizer = sgd(model)
    run = compiled(model, optimizer)
    run(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    loss = run(torch.ones(2, 16)).sum()
    with pytest.raises(GradientError, match=r"zero_grad\(set_to_none=True\)"):
        loss.backward()


@pytest.mark.parametrize("held", [True, False], ids=["p.grad is there", "two forwards"])
def test_two_gradients_of_one_parameter_are_held_and_added(held: bool) -> None:
    found = []
    for in_backward in (True, False):
        torch._dynamo.reset()
        model = small()
        optimizer = sgd(model)
        run = compiled(model, optimizer if in_backward else None)
        if held:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        loss = run(torch.ones(2, 16)).square().sum()
        loss = loss if held else loss + run(torch.full((2, 16), 2.0)).square().sum()
        loss.backward()
        optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_who_reads_a_gradient_that_is_not_held_is_told() -> None:
    model = small()
    compiled(model, sgd(model))(torch.ones(2, 16)).sum().backward()
    with pytest.raises(GradientError, match=r"gradient of 0\.weight is not held: the compiled backward has stepped"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(GradientError, match="not held"):
        model[0].weight.grad.norm()  # type: ignore[index,union-attr]


def test_another_optimizer_of_the_same_parameters_is_told() -> None:
    """Its step did nothing, and the next backward asked for the step of an optimizer that the loop no longer has."""
    model = small()
    optimizer, another = sgd(model), fxprec.optim.AdamW(model.parameters(), lr=0.1)
    compiled(model, optimizer)(torch.ones(2, 16)).sum().backward()
    words = r"this AdamW has nothing to step: .* stepped 0\.weight already, by the optimizer that option optimizer has; call"
    with pytest.raises(GradientError, match=words):
        another.step()
    optimizer.step()


def test_a_grad_scaler_is_told() -> None:
    model = small()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(compiled(model, optimizer)(torch.ones(2, 16)).sum()).backward()
    with pytest.raises(GradientError, match=r"not held.* give the optimizer gradients='bf16', which holds gradients"):
        scaler.step(optimizer)


def test_autograd_grad_is_refused_before_anything_is_stepped() -> None:
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    loss = compiled(model, sgd(model))(torch.ones(2, 16)).sum()
    with pytest.raises(GradientError, match=r"torch\.autograd\.grad\(\) asks for the gradient"):
        torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_backward_of_some_inputs_steps_those() -> None:
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    loss = compiled(model, sgd(model))(torch.ones(2, 16)).square().sum()
    loss.backward(inputs=[model[0].weight])  # type: ignore[index]
    assert [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)] == [False] + [True] * 7


def test_held_parameters_are_named_with_the_reason() -> None:
    model = small()
    model[0].weight.register_hook(lambda g: g)  # type: ignore[index,union-attr]
    optimizer = fxprec.optim.SGD([model[0].weight, model[1].weight], lr=0.1)  # type: ignore[index,list-item]
    with pytest.warns(FxprecWarning) as told:
        compiled(model, optimizer)(torch.ones(2, 16)).square().sum().backward()
    lines = [str(w.message) for w in told]
    assert any("0.weight" in line and "hooks" in line for line in lines)
    assert any("0.bias, 1.bias" in line and "does not hold it" in line for line in lines)
    held = [not isinstance(p.grad, AppliedGradient) for p in model.parameters()]
    assert held == [i != 2 for i in range(8)]


@pytest.mark.parametrize(
    ("own", "options", "why"),
    [
        ({"error_if_nonfinite": True}, {}, "looks at all gradients"),
        ({}, {"recipe": "fp16", "grad_scaling": "dynamic"}, "may skip the step"),
    ],
)
def test_options_that_want_all_gradients_hold_them(own: dict[str, Any], options: dict[str, Any], why: str) -> None:
    model = small()
    optimizer = fxprec.optim.SGD(model.parameters(), lr=0.1, **own)
    with pytest.warns(FxprecWarning, match=why):
        compiled(model, optimizer, **options)(torch.ones(2, 16)).square().sum().backward()
    assert not any(isinstance(p.grad, AppliedGradient) for p in model.parameters())


def test_a_late_hook_is_refused() -> None:
    model = small()
    loss = compiled(model, sgd(model))(torch.ones(2, 16)).sum()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[index,union-attr]
    with pytest.raises(GradientError, match=r"0\.weight got a hook after the model was compiled"):
        loss.backward()


def test_another_optimizers_class_is_refused() -> None:
    model = small()
    with pytest.raises(ConfigError, match=r"optimizer is torch\.optim\.SGD, .*; give it fxprec\.optim\.SGD, or"):
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1))(torch.ones(2, 16))


def test_evaluation_and_saving_between_backward_and_step() -> None:
    model = small()
    optimizer = sgd(model)
    run = compiled(model, optimizer)
    run(torch.ones(2, 16)).sum().backward()
    with torch.no_grad():
        assert run(torch.ones(2, 16)).shape == (2, 8)
    torch.save((model, optimizer), io.BytesIO())


@pytest.mark.inductor
def test_the_peak_falls_by_gradients() -> None:
    def peak(*, in_backward: bool) -> int:
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3)
        run = compiled(model, optimizer if in_backward else None, lowering="inductor")
        for _ in range(2):
            run(torch.ones(8, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            run(torch.ones(8, 512)).sum().backward()
        return peak_bytes(profiled)

    gradient = 512 * 512 * 4
    assert peak(in_backward=False) - peak(in_backward=True) > 6 * gradient


def test_a_peak_budget_counts_no_gradient_that_backward_steps() -> None:
    """Of eight layers, two gradients of 16-bit products and one in float32 live at once; of the last none is read."""

    def planned(*, in_backward: bool, budget: str = "100%") -> int:
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3)
        run = compiled(model, optimizer if in_backward else None, peak_budget=budget)
        run(torch.ones(8, 512)).sum().backward()
        (plan,) = fxprec.backend_of(run).plans
        assert plan.peak_bytes is not None
        return plan.peak_bytes.planned

    gradient = 512 * 512 * 4
    held, stepped = planned(in_backward=False), planned(in_backward=True)
    assert 8 * gradient < held
    assert stepped < 2 * gradient
    with pytest.raises(BudgetError, match=r"lowest peak found is 8\.\d+ MiB"):
        planned(in_backward=False, budget="3MiB")
    assert planned(in_backward=True, budget="3MiB") < 3 << 20


@pytest.mark.inductor
def test_the_gradient_of_a_residual_stream_waits_as_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a norm's weight writes unfinished loops to memory: made too early, all addends of that gradient wait."""
    monkeypatch.setattr(BestOf, "unchanged", lambda *_: None)  # a choice whose peak lies elsewhere
    torch.manual_seed(0)
    model = CharTransformer(vocab=96, context=64, layers=3, heads=2, width=64)
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-4)
    run = compiled(model, optimizer, recipe="fp8", lowering="inductor", peak_budget="70%")
    run(torch.randint(0, 96, (8, 64))).sum().backward()
    (plan,) = fxprec.backend_of(run).plans
    assert plan.peak_bytes is not None
    (graph,) = fxprec.backend_of(run)._graphs
    assert plan.peak_bytes.compiled == plan.peak_bytes.planned + 4 * graph.captured.capacity, "and each row's factor"
    assert "replanned" not in {event.kind for event in fxprec.backend_of(run).events}


def test_a_parameter_is_found_where_groups_are_changed() -> None:
    a, b, c, d = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    optimizer = fxprec.optim.SGD([{"params": [a, b]}, {"params": [c]}], lr=0.1)
    binding = InBackward(optimizer)

    def where(*parameters: nn.Parameter) -> list[tuple[int, int, int] | None]:
        binding.before_backward(())
        found = map(optimizer.position_of, parameters)
        return [None if at is None else (at.group, at.index, at.number) for at in found]

    assert where(a, b, c, d) == [(0, 0, 0), (0, 1, 1), (1, 0, 2), None]
    optimizer.param_groups[0]["params"].pop(0)
    assert where(c, b, a) == [(1, 0, 1), (0, 0, 0), None]
    optimizer.param_groups[1]["params"][0] = d
    assert where(c, d) == [None, (1, 0, 1)]


def test_one_search_of_the_groups_finds_all_parameters_of_a_backward_pass() -> None:
    """A group for each layer is usual: to look at all groups for each parameter would be quadratic."""

    class Counted(list[Any]):
        searches = 0

        def __iter__(self) -> Iterator[Any]:
            self.searches += 1
            return super().__iter__()

    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(20)]
    optimizer = fxprec.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)
    binding = InBackward(optimizer)
    binding.take({f"p{i}": p for i, p in enumerate(parameters)})
    optimizer.param_groups = groups = Counted(optimizer.param_groups)
    binding.before_backward(parameters)
    for parameter in parameters:
        assert not binding.optimizers.sums_gradients(parameter)
        binding.optimizers.holder_of(parameter).step_one(parameter, torch.ones(2))
    assert groups.searches <= 3
