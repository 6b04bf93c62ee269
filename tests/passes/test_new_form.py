"""A form is one class: what a stranger adds is offered, chosen, stored, read back, saved, and named in the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest
import torch
from backend_helpers import eager_backend
from torch import Tensor, nn
from torch.fx import Node

from fxprec import BudgetError, FxprecWarning, Plan, PlanError
from fxprec.config import config
from fxprec.numerics.formats import Format
from fxprec.passes import choose_crossings
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.crossings import needs
from fxprec.passes.forms.candidate import Candidate
from fxprec.passes.forms.encoded import Encoded
from fxprec.passes.forms.stage import Emitter, Stage
from fxprec.plan.explain import explain

aten = torch.ops.aten


WAY = "fourth rows"


@dataclass(frozen=True)
class EveryFourthRow(Encoded):
    """A quarter of a matrix's rows, in bf16: each of them stands for the next three, too."""

    format: Format

    counted = "in a quarter of their rows"
    options = frozenset({WAY})
    ways = (WAY,)
    way = WAY
    missing = "backward reads no 8-bit copy of a matrix"
    error = 1.0

    @classmethod
    def offers(cls, value: Candidate) -> Iterator[Self]:
        if value.low is None or len(value.casts) != 1 or value.is_read_as_it_is:
            return
        if value.val.shape[0] % 4:
            value.refused[WAY] = "its rows are no multiple of 4"
        elif value.val.ndim == 2:
            yield cls(value.low)

    def num_bytes(self, val: Tensor) -> int:
        return val.numel() // 4 * torch.bfloat16.itemsize

    def encode(self, value: Node, cast: Node, stage: Stage, emit: Emitter) -> Sequence[Node]:
        rows = emit(aten.slice.Tensor, (value, 0, 0, 1 << 62, 4))
        return [emit(CONVERT, (rows, torch.bfloat16))]

    def decode(self, saved: Sequence[Node], value: Node, dtype: torch.dtype, emit: Emitter) -> Node:
        rows, width = tensor_of(value).shape
        often = emit(aten.expand.default, (emit(aten.unsqueeze.default, (saved[0], 1)), [rows // 4, 4, width]))
        whole = emit(aten.view.default, (emit(aten.clone.default, (often,)), [rows, width]))
        return emit(CONVERT, (whole, dtype))


class Quartered(torch.autograd.Function):
    """A product whose weight's gradient reads every fourth row four times."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x[::4].repeat_interleave(4, 0), weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        return grad @ weight, grad.t() @ x


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


def trained(layers: nn.Sequential, x: Tensor, **options: object) -> tuple[Plan, list[Tensor], list[tuple[int, ...]]]:
    torch._dynamo.reset()
    backend = eager_backend("native", recipe="fp8", low_ratio=None, **options)
    layers.zero_grad()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = torch.compile(layers, backend=backend)(x)
    y.square().mean().backward()
    grads = [p.grad for p in layers.parameters() if p.grad is not None]
    return backend.plans[0], grads, [tuple(x.shape) for x in saved if x.dtype is torch.bfloat16]


@pytest.fixture(autouse=True)
def form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the form, and its name among the ways."""
    monkeypatch.setattr(needs, "FORMS", (*needs.FORMS, EveryFourthRow))
    monkeypatch.setattr(choose_crossings, "FORMS", needs.FORMS)
    monkeypatch.setattr(config, "WAYS", (*config.WAYS, WAY))


def least(layers: nn.Sequential, *ways: str) -> int:
    with pytest.raises(BudgetError) as error:
        trained(layers, torch.randn(512, 64), peak_budget="1%", ways=ways)
    return error.value.enough


def test_a_form_is_added_by_its_class_and_two_names(layers: nn.Sequential, tmp_path: Path) -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    budget = least(layers, "narrow", WAY)
    assert budget < least(layers, "narrow")
    plan, found, saved = trained(layers, x, peak_budget=budget, ways=("narrow", WAY))
    few = [site for site in plan.sites if site.form == WAY]
    assert few
    assert {site.way for site in few} == {"narrow"}
    assert any(f"{len(few)} in a quarter of their rows" in note for note in plan.notes)
    assert saved.count((128, 64)) == len(few), "what the form encodes is saved, not what it decodes"
    rows = [row for row in plan.saved if row.site in {site.id for site in few}]
    assert [(row.tensor, row.elements, row.bytes) for row in rows] == [(s.tensor, 512 * 64, 128 * 64 * 2) for s in few]
    head, *reasons = explain(plan, few[0].tensor)
    assert head.endswith(f": {WAY}")
    assert f"  backward reads what {WAY!r} makes of the value, and no copy in e4m3fn" in reasons

    y = x
    for i, layer in enumerate(layers):
        is_few = any(s.module == str(i - 1) for s in few)  # what the layer before returns is its input
        y = Quartered.apply(y, layer.weight) if is_few else layer(y)
    wanted = torch.autograd.grad(y.square().mean(), list(layers.parameters()))
    for grad, want in zip(found, wanted, strict=True):
        assert (grad - want).norm() < 0.05 * want.norm()  # of what is kept in 8 bits
    plain = torch.autograd.grad(layers(x).square().mean(), list(layers.parameters()))
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(found, plain, strict=True)) > 0.3

    file = tmp_path / "plan.json"
    plan.save(file)
    again, same, saved_again = trained(layers, x, plan=str(file))
    assert sorted(saved_again) == sorted(saved)
    assert [(s.way, s.form) for s in again.sites] == [(s.way, s.form) for s in plan.sites]
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))


def test_values_that_cannot_have_it_are_told(layers: nn.Sequential, tmp_path: Path) -> None:
    x, odd = torch.randn(512, 64), torch.randn(510, 64)
    with pytest.warns(FxprecWarning, match=f"'{WAY}': no value .* so: for the first value, its rows are no multiple"):
        trained(layers, odd, peak_budget="100%", ways=("narrow", WAY))
    plan, *_ = trained(layers, x, peak_budget=least(layers, "narrow", WAY), ways=("narrow", WAY))
    sites = [replace(site, form="third rows" if site.form else "") for site in plan.sites]
    file = tmp_path / "plan.json"
    replace(plan, sites=tuple(sites)).save(file)
    with pytest.raises(
        PlanError, match=r"sites\[\d\].form .* of the given plan is 'third rows': third rows cannot hold"
    ):
        trained(layers, x, plan=str(file))


def test_nobody_has_it_who_does_not_ask(layers: nn.Sequential) -> None:
    plan, *_ = trained(layers, torch.randn(512, 64), peak_budget="90%")
    assert not any(site.form for site in plan.sites)


def test_a_plan_that_no_budget_made_gives_nobody_a_form(layers: nn.Sequential, tmp_path: Path) -> None:
    x, file = torch.randn(512, 64), tmp_path / "plan.json"
    plan, *_ = trained(layers, x)
    first = next(site.id for site in plan.sites if site.format == "e4m3fn")
    replace(plan, sites=tuple(replace(s, form=WAY if s.id == first else "") for s in plan.sites)).save(file)
    with pytest.warns(
        FxprecWarning, match=rf"sites\[{first}\]\.form of the given plan is '{WAY}', and it stays in e4m3fn: only plans"
    ):
        trained(layers, x, plan=str(file))
