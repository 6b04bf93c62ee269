"""``peak_budget``: what is kept, narrowed and computed again fits, and gradients are as without it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import eager_backend
from models import Apply
from processors import AT_HAND
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fxprec
from benchmarks.memory.measure import peak_bytes
from benchmarks.memory.pairs import loops_left_out
from fxprec import Plan
from fxprec.demo.models import CharTransformer
from fxprec.passes.crossings.best_of import BestOf
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.problem import Problem

TOKENS = torch.randint(0, 32, (4, 64), generator=torch.Generator().manual_seed(3))


class Convolutions(nn.Module):
    """Batch norm writes statistics, dropout draws a mask: neither may happen twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.drop, self.head = nn.BatchNorm2d(16), nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.norm(self.first(x))))
        x = F.relu(self.second(x)) + x
        return self.head(x.mean((2, 3)))


def transformer(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return CharTransformer(vocab=32, context=64, layers=layers, heads=2, width=64)


def gradients(model: nn.Module, run: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)  # for dropout
    model.zero_grad()
    run(x).float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def trained(model: nn.Module, x: Tensor, **options: Any) -> tuple[Plan, Tensor]:
    torch._dynamo.reset()
    backend = eager_backend("native", **{"recipe": "fp8", "low_ratio": None, **options})
    found = gradients(model, torch.compile(model, backend=backend), x)
    plan = backend.plans[0]
    if plan.peak_bytes is not None and plan.peak_bytes.graphs == 1:
        assert plan.saved_bytes is not None
        assert plan.saved_bytes.planned <= plan.peak_bytes.waiting, "the partition saves what the forms store"
    return plan, found


@cache
def fitted(**options: Any) -> tuple[Plan, Tensor]:
    """Return the plan and the gradients of the transformer: a search of seconds, once for all tests that ask for it."""
    return trained(transformer(), TOKENS, **options)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / a.norm() / b.norm())


@pytest.mark.parametrize(
    ("options", "low"),
    [
        ({"peak_budget": "75%"}, True),
        ({"peak_budget": "65%"}, True),
        ({"peak_budget": "70%", "ways": ("recompute",)}, False),
        ({"peak_budget": "80%", "ways": ("narrow",)}, True),
        ({"peak_budget": "70%", "recipe": "bf16"}, False),
    ],
    ids=["three quarters", "two thirds", "recompute", "narrow", "bf16"],
)
def test_a_step_within_its_budget_has_the_gradients_of_one_without(options: dict[str, Any], low: bool) -> None:
    model = transformer()
    plan, found = fitted(**options)
    assert plan.peak_bytes is not None
    share = int(options["peak_budget"].rstrip("%")) / 100
    assert plan.peak_bytes.budget == int(share * plan.peak_bytes.high)
    assert plan.peak_bytes.planned <= plan.peak_bytes.budget
    ways = {site.way for site in plan.sites}
    assert ("narrow" in ways) == low
    if len(may := options.get("ways", ("narrow", "recompute")[not low :])) == 1:
        assert ("recompute" in ways) == (may == ("recompute",))
    assert all((site.format == "e4m3fn") == (site.way == "narrow") for site in plan.sites if site.way)
    assert cosine(found, gradients(model, model, TOKENS)) > (0.9995 if low else 0.99995)


def test_block_formats_are_ways_that_a_plan_file_keeps(tmp_path: Any) -> None:
    model = transformer()
    plan, found = trained(model, TOKENS, peak_budget="80%", ways=("int4",))
    few = {site.tensor for site in plan.sites if (site.way, site.saved_as) == ("narrow", "int4")}
    assert few
    assert cosine(found, gradients(model, model, TOKENS)) > 0.999
    plan.save(tmp_path / "plan.json")
    again, _ = trained(model, TOKENS, plan=tmp_path / "plan.json")
    assert [(s.way, s.saved_as) for s in again.sites] == [(s.way, s.saved_as) for s in plan.sites]
    gelu = next(s for s in plan.sites if s.tensor == "addmm_2")
    wrong = [replace(s, way="narrow", saved_as="int4") if s is gelu else s for s in plan.sites]
    replace(plan, sites=tuple(wrong)).save(tmp_path / "wrong.json")
    with pytest.raises(fxprec.PlanError, match=r"is .int4.: int4 cannot hold it: backward also reads the value"):
        trained(model, TOKENS, plan=tmp_path / "wrong.json")


def test_what_is_saved_is_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitioner adds nothing: where it did, the peak would be another than the planned one."""
    monkeypatch.setattr(BestOf, "unchanged", lambda *_: None)  # the plan without a budget meets 65 %
    saved = {share: fitted.__wrapped__(peak_budget=share)[0].saved_bytes for share in ("100%", "80%", "65%")}
    planned = [saved[share].planned for share in saved]  # type: ignore[union-attr]
    assert planned[0] > 1.3 * planned[1] > 1.3 * planned[2]


def test_statistics_are_written_once_and_a_mask_is_drawn_once() -> None:
    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(8, 3, 16, 16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain, wanted = trained(model, x, recipe="bf16")
    statistics = model.norm.running_var.clone()
    model.load_state_dict(state)
    plan, found = trained(model, x, recipe="bf16", peak_budget="85%")
    assert plan.peak_bytes is not None
    assert plan.saved_bytes.planned < plain.saved_bytes.planned  # type: ignore[union-attr]
    torch.testing.assert_close(model.norm.running_var, statistics)
    assert model.norm.num_batches_tracked == 1
    assert cosine(found, wanted) > 0.9999, "another mask in backward halves it"


def test_a_plan_brings_its_ways(tmp_path: Any) -> None:
    model, path = transformer(), tmp_path / "plan.json"
    plan, found = fitted(peak_budget="70%")
    plan.save(path)
    again, same = trained(model, TOKENS, plan=path)
    assert [site.way for site in again.sites] == [site.way for site in plan.sites]
    assert again.peak_bytes == plan.peak_bytes
    assert again.saved_bytes == plan.saved_bytes
    assert torch.equal(found, same)


def test_ways_that_leave_out_what_cannot_be_computed_again_are_refused(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, path = (
        nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 32)),
        tmp_path / "plan.json",
    )
    plan, _ = trained(model, torch.randn(64, 32), peak_budget="100%")
    assert plan.peak_bytes is not None
    replace(plan, peak_bytes=replace(plan.peak_bytes, kept=())).save(path)
    words = r"^the given plan leaves out .*, which backward needs and which cannot be recomputed; give its site the way"
    with pytest.raises(fxprec.PlanError, match=words):
        trained(model, torch.randn(64, 32), plan=path)


def test_a_promotion_keeps_the_value_high_and_goes_on() -> None:
    model = transformer()
    plan, _ = fitted(peak_budget="65%")
    site = next(s for s in plan.sites if s.way == "narrow")
    torch._dynamo.reset()
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="65%")
    compiled = torch.compile(model, backend=backend)
    gradients(model, compiled, TOKENS)
    (graph,) = backend._graphs
    controller = graph.controller
    controller.plan = controller.plan.promote([site.id], step=controller.step)
    found = gradients(model, compiled, TOKENS)
    assert backend.plans[0].sites[site.id].format == "bf16"
    assert len(backend.compile_reports[0].seconds) == 2
    assert cosine(found, gradients(model, model, TOKENS)) > 0.9995


def test_the_models_own_checkpointing_gives_way() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.model, x, use_reentrant=False)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(64, 32)
    plan, found = trained(model, x, peak_budget="100%")
    assert "peak budget: replaces the model's own checkpointing" in plan.notes
    assert cosine(found, gradients(model, model, x)) > 0.999


def test_a_budget_out_of_reach_names_the_least_and_what_holds_it() -> None:
    words = (
        r"^peak_budget is 10.00 KiB \(10240 bytes\), 1 % of the \d.* that the step holds with everything saved, and "
        r"the lowest peak found is \d.* bytes\), which includes .*KiB parameter gradients \(the largest .*; raise it to .* bytes\), (\d+%) or take a smaller batch$"
    )
    with pytest.raises(fxprec.BudgetError, match=words) as error:
        trained(transformer(layers=1), TOKENS, peak_budget="10KiB")
    named = re.search(words, str(error.value))
    assert named is not None
    share = int(named[1].removesuffix("%"))
    trained(transformer(layers=1), TOKENS, peak_budget=f"{share}%")
    with pytest.raises(fxprec.BudgetError, match=r", \d+%$"):  # of a smaller batch it would be a share, too
        trained(transformer(layers=1), TOKENS, peak_budget=f"{share - 1}%")
    with pytest.raises(fxprec.BudgetError, match=r"add 'narrow' to ways$"):
        trained(transformer(layers=1), TOKENS, peak_budget="10KiB", ways="recompute")


def test_a_budget_out_of_reach_names_modules_and_lines() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 512), nn.Linear(512, 512)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.gelu(self.first(x)))

    with pytest.raises(fxprec.BudgetError) as error:
        trained(Net(), torch.randn(64, 8), peak_budget="1KiB")
    assert str(error.value).startswith("peak_budget is 1.00 KiB (1024 bytes), 0 % of the ")
    held = str(error.value).partition("which includes ")[2].partition("; raise it")[0]
    assert re.match(r"1\.\d+ MiB parameter gradients \(the largest 1\.\d+ MiB of second\.weight\), ", held), held
    assert re.search(r"of second(\.weight|, test_peak_budget\.py:\d+) \(node \w+\)", held), held
    assert not re.search(r"(^|, )\w+ \(\d", held), "no node without a name of the user's"


def test_where_gradients_hold_the_peak_the_optimizer_is_the_way_out() -> None:
    with pytest.raises(fxprec.BudgetError) as error:
        trained(nn.Linear(256, 256), torch.randn(4, 256), peak_budget="10KiB")
    assert str(error.value).endswith(
        "% or give option optimizer, one of fxprec.optim, which steps in backward and frees each gradient"
    )


def test_constants_of_the_graph_are_there_in_backward() -> None:
    """A number made in forward is a constant of the graph."""
    torch.manual_seed(0)
    masked = Apply(lambda x: torch.where(x.abs() < 0.01, torch.tensor(0.5), x))
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), masked, nn.Linear(64, 32)), torch.randn(64, 32)
    plan, found = trained(model, x, peak_budget="100%")
    assert plan.peak_bytes is not None
    assert cosine(found, gradients(model, model, x)) > 0.999


def test_a_graph_of_which_nothing_waits_has_a_plan() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    plan, found = trained(model, x, peak_budget="100%")
    assert plan.peak_bytes is not None
    assert cosine(found, gradients(model, model, x)) > 0.99


def routed(x: Tensor) -> Tensor:
    """Which rows are read is decided by numbers that lie close together: rounded, they would decide otherwise."""
    order = (x.sum(1) * 1e-3).argsort()
    best = x[order].amax(1, keepdim=True) > 0.3
    return torch.where(best, x[order], 2 * x)


def test_what_forward_decided_is_not_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def cheapest_is_to_repeat(self: Problem, size: int, *, is_there: bool) -> float:
        return 1.0

    monkeypatch.setattr(Rates, "keeping", cheapest_is_to_repeat)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), Apply(routed), nn.Linear(64, 32))
    x = torch.randn(256, 32)
    plan, found = trained(model, x, peak_budget="100%")
    assert "recompute" in {site.way for site in plan.sites}
    assert cosine(found, gradients(model, model, x)) > 0.999


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"peak_budget": 0}, "peak_budget is 0, not positive"),
        ({"peak_budget": -1}, "peak_budget is -1, not positive"),
        ({"peak_budget": float("nan")}, "peak_budget is nan; give it"),
        ({"peak_budget": "12 gibi"}, "peak_budget is '12 gibi', which is not a size"),
        ({"peak_budget": "0%"}, "peak_budget is '0%'; give it a share above 0% and up to 100%"),
        ({"peak_budget": "120%"}, "peak_budget is '120%'; give it a share above 0% and up to 100%"),
        ({"peak_budget": "x%"}, "peak_budget is 'x%'; give it a share above 0% and up to 100%"),
        ({"ways": ()}, r"ways is \(\); give it a tuple of some of 'narrow', 'int4', 'int2', 'recompute', 'off"),
        ({"ways": ("shrink",)}, "unknown ways 'shrink'; allowed: .*'offload'"),
        (
            {"peak_budget": 9, "ways": ("offload",), "mode": "reduce-overhead"},
            "ways has 'offload', and mode='reduce-overhead' records CUDA graphs, which cannot .*; choose "
            "mode='default'",
        ),
        ({"ways": ("int3", "recompute")}, r"unknown ways 'int3'; did you mean 'int4'\?"),
        ({"ways": ("int4",), "recipe": "bf16"}, "recipe 'bf16' has no low tensors; use it with fp8, or leave it out"),
        (
            {"peak_budget": 9, "activation_budget": 9},
            "peak_budget and activation_budget are both given, and activation_budget bounds what is saved for "
            "backward, "
            "which peak_budget does too; keep one of them",
        ),
        ({"peak_budget": 9, "plan": "p.json"}, "peak_budget and plan are both given, and plan says how each value"),
        (
            {"peak_budget": 9, "storage": "simulate"},
            "peak_budget bounds what a step holds when operators read unrounded values, .* rounded ones; leave "
            "storage out",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_budgets_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(fxprec.ConfigError, match=rf"^[^\n]*{words}[^\n]*$"):
        fxprec.Config(**options)


def test_ways_without_a_budget_are_refused() -> None:
    words = "^ways says how a peak budget is met, and no peak_budget is given; give peak_budget or step_budget too, or leave"
    with pytest.raises(fxprec.ConfigError, match=words):
        fxprec.Backend(fxprec.Config(ways=("offload",)))


class Gated(nn.Module):
    """A SwiGLU block: backward reads a sigmoid in one loop, and recomputes the activation in another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(128, 344), nn.Linear(128, 344), nn.Linear(344, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def convolutions(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


@pytest.mark.inductor
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(Gated(), Gated()), (2048, 128)),
        (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)), (2048, 128)),
        (nn.Sequential(*convolutions(3, 16), *convolutions(16, 16), *convolutions(16, 32)), (8, 3, 64, 64)),
        (nn.Sequential(*convolutions(3, 16), *convolutions(16, 16), nn.Conv2d(16, 8, 1)), (8, 3, 64, 64)),
    ],
    ids=["gated", "gelu", "convolutions", "ends in 1 x 1"],
)
def test_a_plan_without_a_bound_is_predicted(model: nn.Module, shape: tuple[int, ...], recipe: str) -> None:
    """Backward recomputes most of what it reads."""
    backend = fxprec.Backend(fxprec.Config(recipe=recipe, peak_budget="100%"))
    torch.manual_seed(0)
    with loops_left_out():
        torch.compile(model, backend=backend)(torch.randn(shape)).square().mean().backward()
    plan = backend.plans[0].peak_bytes
    assert plan is not None
    assert plan.compiled is not None
    assert plan.planned == pytest.approx(plan.compiled, rel=0.02)


@pytest.mark.cpu_dependent  # oneDNN's workspace is that of the processor which runs it
@pytest.mark.inductor
def test_the_allocator_sees_no_more_than_the_budget() -> None:
    torch.manual_seed(0)
    model, tokens = CharTransformer(vocab=32, context=256, layers=2, heads=2, width=64), torch.randint(0, 32, (8, 256))
    budget = "50%" if torch.bfloat16 in AT_HAND.gemms else "75%"  # GEMMs that are widened take workspace
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", peak_budget=budget))
    compiled = torch.compile(model, backend=backend)
    reference = gradients(model, model, tokens)
    assert cosine(gradients(model, compiled, tokens), reference) > 0.9995
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        compiled(tokens).float().square().mean().backward()
    plan = backend.plans[0].peak_bytes
    assert plan is not None
    assert plan.planned <= plan.budget
    assert plan.compiled is not None
    assert plan.compiled <= plan.budget
    outside = 2 * 4 * tokens.numel() * 32  # the square of the result, and its gradient
    assert 0.9 * plan.planned < peak_bytes(profiled) < 1.02 * plan.planned + outside
