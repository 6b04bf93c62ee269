"""What a person changes in a plan file takes effect, or is refused in words that name the entry."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_helpers import eager_backend, mlp

import fxprec
from fxprec.config.recipes import find_recipe

Data = dict[str, Any]


def plan_of(**options: Any) -> fxprec.Plan:
    torch.compiler.reset()
    torch.manual_seed(0)
    backend = eager_backend(**{"recipe": "fp8", "low_ratio": None, **options})
    compiled = torch.compile(mlp(), backend=backend)
    for _ in range(2):
        compiled(torch.randn(4, 16)).square().mean().backward()
    return backend.plans[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return plan_of(storage="native", low_ratio=0.6).to_dict()


@pytest.fixture
def followed(saved: Data, tmp_path: Path) -> Callable[..., fxprec.Plan]:
    """Edit a copy of the plan and train with it."""

    def follow(edit: Callable[[Data], None], **options: Any) -> fxprec.Plan:
        data = json.loads(json.dumps(saved))
        edit(data)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        return plan_of(**{"storage": "native", "plan": str(path), **options})

    return follow


def sites_of(plan: fxprec.Plan, group: int) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for site in plan.sites:
        if site.group == group:
            found.setdefault(site.direction, set()).add(site.format)
    return found


def one_group(saved: Data, *, low: bool) -> int:
    """Return a group held low or high, with sites in both directions."""
    by_group = {g: {s["direction"] for s in saved["sites"] if s["group"] == g} for g in range(len(saved["groups"]))}
    return next(g["id"] for g in saved["groups"] if g["low"] is low and len(by_group[g["id"]]) == 2)


def test_a_group_switched_over_takes_its_sites_along(saved: Data, followed: Any) -> None:
    up, down = one_group(saved, low=True), one_group(saved, low=False)

    def edit(data: Data) -> None:
        data["groups"][up]["low"], data["groups"][down]["low"] = False, True

    plan = followed(edit)
    assert sites_of(plan, up) == {"forward": {"bf16"}, "backward": {"bf16"}}
    of_group = [s for s in plan.sites if s.group == down]
    assert {(s.format, s.reads) for s in of_group} == {("e4m3fn", "backward"), ("bf16", "all")}
    assert all(s.is_unread for s in of_group if s.format == "bf16")
    assert (plan.groups[up].low, plan.groups[down].low) == (False, True)
    change = saved["groups"][down]["elements"] - saved["groups"][up]["elements"]
    assert plan.achieved_low_ratio == pytest.approx(saved["achieved_low_ratio"] + change / saved["total_elements"])
    assert all(g.solved_low is g.low for g in plan.groups), "the plan in force is of one piece"


def test_a_site_edited_beside_its_group_keeps_its_format_or_is_a_contradiction(saved: Data, followed: Any) -> None:
    group = one_group(saved, low=True)
    site = next(s["id"] for s in saved["sites"] if s["group"] == group and s["reads"] == "backward")

    def edit(data: Data, fmt: str) -> None:
        data["groups"][group]["low"] = False
        data["sites"][site]["format"] = fmt

    plan = followed(lambda data: edit(data, "fp16"))
    assert plan.sites[site].format == "fp16"
    assert sites_of(plan, group)["backward"] == {"bf16"}
    words = (
        rf"groups\[{group}\]\.low was set to false and sites\[{site}\]\.format \(.*\) to 'e5m2', which contradict each "
        r"other"
    )
    with pytest.raises(fxprec.PlanError, match=words):
        followed(lambda data: edit(data, "e5m2"))


def sites_as(saved: Data, **wanted: str) -> list[int]:
    return [s["id"] for s in saved["sites"] if all(s[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("storage", ["native", "packed"])
@pytest.mark.parametrize("fmt", ["fp32", "fp16", "e5m2"])
def test_a_site_may_hold_any_format_its_storage_has(saved: Data, followed: Any, fmt: str, storage: str) -> None:
    chosen = sites_as(saved, reads="backward")

    def edit(data: Data) -> None:
        for site in chosen:
            data["sites"][site]["format"] = fmt

    plan = followed(edit, storage=storage)
    assert {plan.sites[i].format for i in chosen} == {fmt}
    assert len(plan.sites) == len(saved["sites"])


@pytest.mark.parametrize("kind", ["param", "grad_output"])
def test_a_format_that_nobody_would_read_is_told(saved: Data, followed: Any, kind: str) -> None:
    site = sites_as(saved, kind=kind)[1]

    def edit(data: Data) -> None:
        data["sites"][site]["format"] = "fp16"

    tensor = re.escape(saved["sites"][site]["tensor"])
    words = (
        rf"{tensor} \(.*\): sites\[{site}\]\.format of the given plan is 'fp16', and it stays in bf16, since nobody "
        r"would read a low copy: no GEMM multiplies .*; storage='simulate' rounds it for every reader"
    )
    with pytest.warns(fxprec.FxprecWarning, match=words):
        plan = followed(edit)
    assert plan.sites[site].format == "bf16"
    with pytest.raises(fxprec.FallbackError, match=words):
        followed(edit, strict=True)


@pytest.mark.parametrize("group_is_low", [True, False])
def test_in_a_simulation_a_site_holds_the_format_it_is_given(group_is_low: bool, tmp_path: Path) -> None:
    """A parameter, or a gradient, too: every reader gets the rounded value."""
    options, path = {"storage": "simulate", "low_ratio": 0.6}, tmp_path / "plan.json"
    data = plan_of(**options).to_dict()
    low = [g["low"] for g in data["groups"]]
    chosen = [s["id"] for s in data["sites"] if low[s["group"]] is group_is_low]
    assert {data["sites"][i]["kind"] for i in chosen} >= {"output", "param", "grad_output"}
    for i in chosen:
        data["sites"][i]["format"] = "fp16"
    path.write_text(json.dumps(data))
    plan = plan_of(storage="simulate", plan=str(path))
    assert {plan.sites[i].format.removesuffix("_sat") for i in chosen} == {"fp16"}
    assert {s.reads for s in plan.sites} == {"all"}


def test_in_a_simulation_a_group_switched_over_takes_its_sites_along(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = plan_of(storage="simulate", low_ratio=0.6).to_dict()
    up, down = one_group(data, low=True), one_group(data, low=False)
    data["groups"][up]["low"], data["groups"][down]["low"] = False, True
    path.write_text(json.dumps(data))
    plan = plan_of(storage="simulate", plan=str(path))
    assert sites_of(plan, up) == {"forward": {"bf16"}, "backward": {"bf16"}}
    assert sites_of(plan, down) == {"forward": {"e4m3fn"}, "backward": {"e5m2_sat", "bf16"}}, "bf16: weight_grad"


def test_a_format_without_a_dtype_is_refused_in_native_storage(saved: Data, followed: Any, tmp_path: Path) -> None:
    words = (
        r"sites\[0\]\.format \(args.0\) of the given plan is '1-5-2', .*storage='native' needs one; give "
        r"storage='packed'"
    )

    def edit(data: Data) -> None:
        data["sites"][0]["format"] = "1-5-2"

    with pytest.raises(fxprec.PlanError, match=words):
        followed(edit)
    assert followed(edit, storage="packed").sites[0].format == "1-5-2"
    path = tmp_path / "hfp8.json"
    plan_of(recipe="hfp8", storage="packed", low_ratio=0.6).save(path)
    told = pytest.warns(fxprec.FxprecWarning, match="recipe='fp8' is not that of the plan given, 'hfp8'")
    with told, pytest.raises(fxprec.PlanError, match=r"is '1-\d-\d\+?\d?', which torch has no dtype for"):
        plan_of(plan=str(path), storage="native")


def test_a_plan_brings_who_reads_what(saved: Data, followed: Any) -> None:
    assert {s["reads"] for s in saved["sites"]} == {"backward", "all"}
    plan = followed(lambda data: None)
    assert [(s.format, s.reads, s.why) for s in plan.sites] == [
        (s["format"], s["reads"], s.get("why", "")) for s in saved["sites"]
    ]


@pytest.mark.parametrize("storage", ["native", "simulate"])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_a_plan_file_of_training_serves_evaluation_too(first: str, tmp_path: Path, storage: str) -> None:
    path, saved = tmp_path / "plan.json", plan_of(storage=storage, low_ratio=0.6).to_dict()
    path.write_text(json.dumps(saved))
    torch.compiler.reset()
    torch.manual_seed(0)
    backend = eager_backend(storage, recipe="fp8", low_ratio=None, plan=str(path))
    compiled, x = torch.compile(mlp(), backend=backend), torch.randn(4, 16)
    for mode in ("training", "evaluation") if first == "training" else ("evaluation", "training"):
        with torch.set_grad_enabled(mode == "training"):
            compiled(x)
    training, evaluation = sorted((p for p in backend.all_plans if p), key=lambda p: -len(p.sites))
    assert evaluation.low_groups == training.low_groups == {g["id"] for g in saved["groups"] if g["low"]}
    assert {site.tensor for site in evaluation.sites} <= {site.tensor for site in training.sites}
    if storage == "native":
        assert {site.format for site in evaluation.sites} == {"bf16"}, "evaluation stores nothing"
    else:
        held = {site.tensor: site.format for site in training.sites if site.direction == "forward"}
        assert {site.tensor: site.format for site in evaluation.sites}.items() <= held.items()


def test_evaluation_keeps_high_what_training_keeps_high() -> None:
    backend = eager_backend("native", recipe="fp8", low_ratio=0.6, keep_high=("2",))
    compiled, x = torch.compile(mlp(), backend=backend), torch.randn(4, 16)
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    training, evaluation = backend.all_plans
    assert training
    assert evaluation
    for plan in (training, evaluation):
        assert {s.format for s in plan.sites if s.module == "2" and s.direction == "forward"} == {"bf16"}


def test_no_reason_is_read_as_data(saved: Data, followed: Any) -> None:
    """A group that another compilation holds low takes its sites along, whatever words say why they are high."""
    is_low = [g["low"] for g in saved["groups"]]
    unread = [s["id"] for s in saved["sites"] if s.get("unread")]
    assert unread
    assert all(is_low[saved["sites"][i]["group"]] for i in unread)

    def reworded(data: Data) -> None:
        for site in data["sites"]:
            site["why"] = "hand-edited" if site.get("unread") else "nobody would read a low copy"
            site.setdefault("unread", False)

    plan = followed(reworded)
    assert [s.id for s in plan.sites if s.is_unread] == unread
    assert {s.id: s.format for s in plan.sites} == {s["id"]: s["format"] for s in saved["sites"]}


def test_a_plan_brings_its_recipe_and_its_storage(saved: Data, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(saved))
    backend = fxprec.Backend(fxprec.Config(plan=path, lowering="eager", strict=True))
    assert (backend.config.recipe, backend.config.storage) == (find_recipe("fp8"), None)
    packed = plan_of(recipe="hfp8", storage="packed")
    packed.save(path)
    backend = fxprec.Backend(fxprec.Config(plan=path, lowering="eager", strict=True))
    torch.compiler.reset()
    torch.compile(mlp(), backend=backend)(torch.randn(4, 16)).square().mean().backward()
    followed = backend.plans[0]
    assert (followed.recipe, followed.storage) == (packed.recipe, "packed")
    assert [s.format for s in followed.sites] == [s.format for s in packed.sites]


def test_a_recipe_that_is_not_the_plans_is_told(saved: Data, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(saved))
    words = (
        "^recipe='fp16' is not that of the plan given, 'fp8': the plan's formats are followed, and all else .* leave"
    )
    with pytest.warns(fxprec.FxprecWarning) as told:
        plan_of(recipe="fp16", storage="native", plan=str(path))
    assert re.search(words, str(told[0].message))
