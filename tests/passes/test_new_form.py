"""A form is one class: what a stranger adds is offered, chosen, stored, read back, saved and written into the plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
import torch
from backend_helpers import eager_backend
from torch import Tensor, nn
from torch.fx import Node

from fxprec import Plan
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.ways import row_of
from fxprec.passes.crossings import needs
from fxprec.passes.forms.candidate import Candidate
from fxprec.passes.forms.encoded import Encoded
from fxprec.passes.forms.own import Own
from fxprec.passes.forms.stage import Emitter, Stage
from fxprec.plan.rows import Site

aten = torch.ops.aten


@dataclass(frozen=True)
class EverySecondRow(Encoded):
    """Half of a matrix's rows, in bf16: each of them stands for the next one, too."""

    format: Format  # of the row in the plan

    counted = "in half of their rows"
    options = frozenset({"narrow"})
    error = 1.0

    @classmethod
    def offers(cls, value: Candidate) -> Iterator[Self]:
        if value.low is not None and len(value.casts) == 1 and not value.is_read_as_it_is and value.val.ndim == 2:
            yield cls(value.low)

    def num_bytes(self, val: Tensor) -> int:
        return val.numel() // 2 * torch.bfloat16.itemsize

    def encode(self, value: Node, cast: Node, stage: Stage, emit: Emitter) -> Sequence[Node]:
        rows = emit(aten.slice.Tensor, (value, 0, 0, 1 << 62, 2))
        return [emit(CONVERT, (rows, torch.bfloat16))]

    def decode(self, saved: Sequence[Node], value: Node, dtype: torch.dtype, emit: Emitter) -> Node:
        rows, width = tensor_of(value).shape
        twice = emit(aten.expand.default, (emit(aten.unsqueeze.default, (saved[0], 1)), [rows // 2, 2, width]))
        whole = emit(aten.view.default, (emit(aten.clone.default, (twice,)), [rows, width]))
        return emit(CONVERT, (whole, dtype))

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        return row_of(site, "narrow", self.format.name, "every second row is kept")

    def matches_row(self, site: Site) -> bool:
        return site.way == "narrow"


class Halved(torch.autograd.Function):
    """A product whose weight's gradient reads every second row twice."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x[::2].repeat_interleave(2, 0), weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        return grad @ weight, grad.t() @ x


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


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


def test_a_form_is_added_by_its_class_alone(
    layers: nn.Sequential, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(needs, "FORMS", (Own, EverySecondRow))
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    plan, found, saved = trained(layers, x, peak_budget="95%", ways=("narrow",))
    halved = [s for s in plan.sites if s.why == "every second row is kept"]
    assert halved
    assert any(f"{len(halved)} in half of their rows" in note for note in plan.notes)
    assert saved.count((256, 64)) == len(halved), "what the form encodes is saved, not what it decodes"

    y = x
    for i, layer in enumerate(layers):
        is_halved = any(s.module == str(i - 1) for s in halved)  # what the layer before returns is its input
        y = Halved.apply(y, layer.weight) if is_halved else layer(y)
    wanted = torch.autograd.grad(y.square().mean(), list(layers.parameters()))
    for grad, want in zip(found, wanted, strict=True):
        assert (grad - want).norm() < 0.02 * want.norm()  # bf16 products
    plain = torch.autograd.grad(layers(x).square().mean(), list(layers.parameters()))
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(found, plain, strict=True)) > 0.3

    file = tmp_path / "plan.json"
    plan.save(file)
    assert "every second row is kept" in json.dumps(json.loads(file.read_text()))
    again, same, saved_again = trained(layers, x, plan=str(file))
    assert sorted(saved_again) == sorted(saved)
    assert [s.way for s in again.sites] == [s.way for s in plan.sites]
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))
