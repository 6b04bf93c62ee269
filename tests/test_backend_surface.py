"""The public surface: one line to compile, one backend for every compiled model, what it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_helpers import Loud, mlp
from torch import Tensor

import fxprec
from fxprec.config import Settings
from fxprec.passes import pipeline

OPTIONS = {"recipe": "hfp8", "low_ratio": 0.6, "lowering": "eager"}


def train_step(compiled, x: Tensor) -> None:
    compiled(x).square().mean().backward()


def test_backend_of_finds_the_backend_of_modules_functions_and_modules_compiled_in_place() -> None:
    x = torch.randn(8, 16)
    module = torch.compile(mlp(), backend="fxprec", options=OPTIONS)
    function = torch.compile(lambda x, w: torch.relu(x @ w), backend="fxprec", options=OPTIONS)
    in_place = Loud()
    in_place.compile(backend="fxprec", options=OPTIONS)
    own = fxprec.Backend(fxprec.Config(**OPTIONS))
    given = torch.compile(mlp(), backend=own)
    train_step(module, x)
    train_step(lambda x: function(x, torch.randn(16, 3, requires_grad=True)), x)
    train_step(in_place, x)
    train_step(given, x)
    assert fxprec.backend_of(given) is own
    backends = [fxprec.backend_of(c) for c in (module, function, in_place)]
    assert [len(plan.gemms) for b in backends for plan in b.plans] == [3, 1, 3]
    assert backends[0].config == fxprec.Config(**OPTIONS)
    assert len({id(b) for b in backends}) == 3


def test_backend_of_is_there_before_the_first_call() -> None:
    compiled = torch.compile(mlp(), backend="fxprec", options=OPTIONS)
    backend = fxprec.backend_of(compiled)
    assert backend.plans == ()
    train_step(compiled, torch.randn(8, 16))
    assert fxprec.backend_of(compiled) is backend
    assert len(backend.plans) == 1


def test_models_compiled_with_equal_options_keep_separate_state() -> None:
    """Dynamo would hand both one compiled graph: same code, equal options."""
    first, second = (torch.compile(mlp(), backend="fxprec", options=dict(OPTIONS)) for _ in range(2))
    x = torch.randn(8, 16)
    train_step(first, x)
    train_step(second, x * 1e4)
    train_step(second, x * 1e4)
    a, b = fxprec.backend_of(first), fxprec.backend_of(second)
    assert a is not b
    assert (len(a.plans), len(b.plans)) == (1, 1)
    assert b.plans[0].promoted
    assert not a.plans[0].promoted
    assert not any(e.kind == "promotion" for e in a.events)


@pytest.mark.parametrize("other", [mlp, lambda: torch.compile(mlp()), lambda: 3], ids=["plain", "inductor", "int"])
def test_backend_of_refuses_what_fxprec_did_not_compile(other) -> None:
    with pytest.raises(fxprec.ConfigError, match=r"was not compiled by fxprec; give backend_of what torch\.compile"):
        fxprec.backend_of(other())


def test_plans_are_the_training_graphs_in_compile_order() -> None:
    backend = fxprec.Backend(fxprec.Config(**OPTIONS))

    def body(x: Tensor, w: Tensor) -> Tensor:
        x = x @ w
        torch._dynamo.graph_break()
        return torch.relu(x) @ w @ w

    compiled = torch.compile(body, backend=backend)
    x, w = torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)
    with torch.no_grad():
        compiled(x, w)
    assert backend.plans == ()
    train_step(lambda x: compiled(x, w), x)
    assert [len(plan.gemms) for plan in backend.plans] == [1, 2]
    with torch.no_grad():
        compiled(x, w)
    assert len(backend.plans) == 2


def test_stats_rows_hold_the_measured_values() -> None:
    backend = fxprec.Backend(fxprec.Config(**{**OPTIONS, "low_ratio": 1.0, "promote_above": None}))
    compiled = torch.compile(mlp(), backend=backend)
    x = torch.full((4, 16), 1e-5)  # below half of 2**-13, the smallest subnormal
    x[0] = 31.5  # beyond 30 and half a step
    train_step(compiled, x)
    rows = backend.stats()
    assert [row["site"] for row in rows] == [site.id for site in backend.plans[0].sites]
    row = next(r for r in rows if r["tensor"].startswith("args") and r["kind"] == "output")
    assert (row["overflow_ratio"], row["underflow_ratio"], row["amax"]) == (0.25, 0.75, 31.5)
    assert (row["format"], row["scale_exponent"], row["promoted_at"]) == ("1-4-3+4", 0, None)
    assert any(r["module"] == "2" and r["kind"] == "param" for r in rows)
    json.dumps(rows)


def test_events_tell_step_kind_site_and_detail() -> None:
    backend = fxprec.Backend(fxprec.Config(**{**OPTIONS, "low_ratio": 1.0}))
    compiled = torch.compile(Loud(), backend=backend)
    for _ in range(3):
        train_step(compiled, torch.randn(8, 16))
    found = [e for e in backend.events if e.kind == "promotion"]
    assert [e.step for e in backend.events] == sorted(e.step for e in backend.events)
    assert found[0].step == 1
    assert found[0].detail.startswith("1-4-3+4 -> 1-6-9: overflow ratio ")
    assert "addmm (first, backend_helpers.py:" in "".join(e.site for e in found)  # module and source line


def test_inspecting_between_steps_does_not_swallow_a_promotion() -> None:
    """stats() and state_dict() read what the next step would have read."""
    x = torch.randn(8, 16) * 1e3

    def gradients(inspect: bool) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(3)
        model = mlp()
        backend = fxprec.Backend(fxprec.Config(**{**OPTIONS, "storage": "packed", "low_ratio": 1.0}))
        compiled = torch.compile(model, backend=backend)
        for _ in range(4):
            model.zero_grad()
            train_step(compiled, x)
            if inspect:
                backend.stats()
                backend.state_dict()
        assert backend.plans[0].promoted
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("asked", [{"low_ratio": 0.6}, {"activation_budget": "1GiB"}], ids=lambda a: next(iter(a)))
def test_a_ratio_or_budget_that_recipe_fp32_cannot_honour_is_told(asked: dict[str, object]) -> None:
    x, options = torch.randn(8, 16), {"recipe": "fp32", **asked}
    with pytest.warns(fxprec.FxprecWarning, match=f"{next(iter(asked))}=.* has no effect: recipe 'fp32' holds every"):
        torch.compile(mlp(), backend=fxprec.Backend(fxprec.Config(**options)))(x)
    with pytest.raises(fxprec.FxprecError, match="choose a recipe with a low format, such as 'fp8', or leave it out"):
        torch.compile(mlp(), backend=fxprec.Backend(fxprec.Config(strict=True, **options)))(x)


@pytest.mark.parametrize(
    "asked",
    [{"dump": "dumps"}, {"verify": True}, {"on_nonfinite": "raise"}, {"allocator": "compact"}, {"watch_every": 3}],
    ids=lambda a: next(iter(a)),
)
def test_what_is_done_to_planned_graphs_alone_is_refused_under_recipe_fp32(asked: dict[str, Any]) -> None:
    backend = fxprec.Backend(fxprec.Config(recipe="fp32", strict=True, **asked))
    with pytest.raises(fxprec.FxprecError, match=f"{next(iter(asked))}=.* has no effect: recipe 'fp32' holds every"):
        torch.compile(mlp(), backend=backend)(torch.randn(8, 16))


def test_what_chooses_groups_beside_a_plan_is_told(tmp_path: Path) -> None:
    first = fxprec.Backend(fxprec.Config(**OPTIONS))
    x = torch.randn(8, 16)
    train_step(torch.compile(mlp(), backend=first), x)
    plan = tmp_path / "plan.json"
    first.plans[0].save(plan)
    given = {"recipe": OPTIONS["recipe"], "lowering": "eager", "plan": plan}
    for name, value in {"policy": "random", "keep_high": ("0",), "seed": 3}.items():
        torch.compiler.reset()
        with pytest.warns(
            fxprec.FxprecWarning, match=rf"{name}=.* has no effect: the plan given says what is low; lea"
        ):
            train_step(torch.compile(mlp(), backend=fxprec.Backend(fxprec.Config(**given, **{name: value}))), x)


def test_compile_reports_say_how_long_each_graph_took() -> None:
    backend = fxprec.Backend(fxprec.Config(**OPTIONS))
    train_step(torch.compile(mlp(), backend=backend), torch.randn(8, 16))
    (report,) = backend.compile_reports
    assert report.graph == 0
    assert 0 < report.passes_seconds < sum(report.seconds)
    assert len(report.passes) == len(pipeline.pipeline_for(Settings.of(backend.config)))


def test_with_torchs_fallback_random_a_model_draws_what_it_draws_uncompiled() -> None:
    """docs/limits.md: else its numbers are others."""
    model, x = torch.nn.Dropout(0.5), torch.ones(64, 32)

    def drawn(call) -> Tensor:
        torch.manual_seed(1)
        return call(x)

    wanted = drawn(model)
    assert not torch.equal(drawn(torch.compile(model, backend="fxprec", options=OPTIONS)), wanted)
    torch.compiler.reset()
    with torch._inductor.config.patch(fallback_random=True):
        assert torch.equal(drawn(torch.compile(model, backend="fxprec", options=OPTIONS)), wanted)
