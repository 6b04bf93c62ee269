"""Pass choose-crossings: without a budget its choice gives the gradients of torch's min-cut and saves no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend
from models import Parts, Residual
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxprec import compat
from fxprec.ir.symbolic import Quantize
from fxprec.passes import pipeline
from fxprec.passes.analysis.block_copies import Refusals, wanted_block_formats
from fxprec.passes.analysis.joint import is_backward
from fxprec.passes.analysis.replay.kernels import can_repeat
from fxprec.passes.base import Work
from fxprec.passes.crossings import problem, without_budget
from fxprec.passes.crossings.needs import Needs, needs_of
from fxprec.passes.forms.bits import Bits
from fxprec.passes.forms.blocks import Blocks
from fxprec.passes.forms.stage import Stage
from tests.golden_model import Block


class Written(nn.Module):
    """A buffer that backward reads and forward writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("mean", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x) * self.mean.clone())
        self.mean.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return self.last(y * self.mean.clone())


class Widened(nn.Module):
    """Under autocast: backward of tanh reads an alias of what the next layer, behind a conversion, stores in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(torch.tanh(self.first(x)).float()).float()


def residual() -> nn.Module:
    """Dropout, a norm and a residual between layers."""
    inner = (Residual(nn.Linear(128, 128)), nn.LayerNorm(128), nn.SiLU())
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), *inner, nn.Linear(128, 16))


def rounded() -> nn.Module:
    """A layer whose gradient is 0, and depends on no output's: what it makes is rounded up."""
    layers = {"steps": nn.Linear(64, 64), "last": nn.Linear(64, 64)}
    return Parts(lambda m, x: torch.ceil(F.gelu(m.steps(x))) + F.gelu(m.last(x)), **layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "block": (Block, (4, 3, 16, 16)),
    "residual": (residual, (64, 64)),
    "written": (Written, (64, 64)),
    "rounded": (rounded, (64, 64)),
}


def trained(name: str, recipe: str) -> tuple[list[Tensor], int]:
    """Return the gradients of two steps, and the bytes that the forward half saves."""
    return trained_as(*MODELS[name], recipe)


def trained_as(make: Callable[[], nn.Module], shape: tuple[int, ...], recipe: str) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model, x, backend = make(), torch.randn(shape), eager_backend(recipe=recipe)
    run = compiled(model, backend)
    for _ in range(2):
        torch.manual_seed(1)
        run(x).square().mean().backward()
    (plan,) = backend.plans
    assert plan.saved_bytes is not None
    return [p.grad for p in model.parameters() if p.grad is not None], plan.saved_bytes.planned


@pytest.fixture
def who_cuts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who has cut each joint graph."""
    found: list[str] = []
    for name in ("cut", "min_cut"):
        monkeypatch.setattr(compat, name, partial(_noted, getattr(compat, name), name, found))
    return found


def _noted(function: Callable[..., object], name: str, found: list[str], *args: object, **options: object) -> object:
    found.append(name)
    return function(*args, **options)


@dataclass(frozen=True)
class StoreInBlocks:
    """In the place of choose-crossings: store each copy in blocks that may be, and choose nothing."""

    name: str = "store-in-blocks"

    def apply(self, work: Work) -> None:
        graph, refusals = work.joint.graph, Refusals(work)
        casts = [(q, work.book.sites[cast.row]) for q, cast in Quantize.among(Quantize.nodes(graph))]
        wanted = [
            (q, site, fmt) for q, site in casts if not is_backward(q) for fmt in wanted_block_formats(work, site, q)
        ]
        found = [(q, site, fmt) for q, site, fmt in wanted if refusals.of(site, q, fmt) is None]
        needs, low = needs_of(work), work.settings.recipe.lo_forward
        kept = {Quantize.of(q).x: Blocks(fmt, low) for q, _, fmt in found}
        stage = Stage(work, needs, kept)
        for (value, form), (_, site, fmt) in zip(kept.items(), found, strict=True):
            form.store(value, stage)
            work.book.sites[site.id] = replace(site, saved_as=fmt.name)


@pytest.mark.parametrize("recipe", ["fp8", "bf16", "fp8+int4"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torchs_min_cut_and_no_more_is_saved(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch, who_cuts: list[str]
) -> None:
    """Where, as in the min-cut, each operator counts alike: recomputed from 8 bits a result has another error.

    And where masks are saved as booleans, as the min-cut saves them.
    """
    monkeypatch.setattr(Needs, "can_repeat", lambda self, node: can_repeat(node))
    monkeypatch.setattr(Bits, "can_hold", lambda val, is_drawn: False)
    monkeypatch.setattr(problem, "_AMPLIFIED", 0.0)
    monkeypatch.setattr(without_budget, "_LIGHT", 1.0)
    monkeypatch.setattr(without_budget, "_PASSES", 1)
    found, saved = trained(name, recipe)
    steps = [StoreInBlocks() if step.name == "choose-crossings" else step for step in pipeline.PIPELINE]
    monkeypatch.setattr(pipeline, "PIPELINE", tuple(steps))
    wanted, bytes_of_min_cut = trained(name, recipe)
    assert who_cuts == ["cut", "min_cut"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert saved <= bytes_of_min_cut


SAVED = {
    "block": {"fp8": 187_456, "bf16": 272_512},
    "residual": {"fp8": 21_760, "bf16": 42_240},
    "written": {"fp8": 8_704, "bf16": 16_896},
    "rounded": {"fp8": 12_288, "bf16": 24_576},
}


@pytest.mark.parametrize(("recipe", "error"), [("fp8", 0.035), ("bf16", 0.02)])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_where_light_operators_are_recomputed(name: str, recipe: str, error: float) -> None:
    """An error of 2 % in bf16 is autocast's, in the block's convolution before a norm."""
    found, saved = trained(name, recipe)
    exact, _ = trained(name, "fp32")
    for a, b in zip(found, exact, strict=True):
        assert float((a - b).norm()) <= error * float(b.norm()) + 1e-6
    assert saved == SAVED[name][recipe]


def test_what_backward_reads_a_view_of_is_kept_as_it_is() -> None:
    """So the next layer's weight gradient reads it too, unrounded. No copy in 8 bits gives back what the view shows."""
    (*_, weight, bias), saved = trained_as(Widened, (64, 64), "fp8")
    (*_, of_bf16, bias_of_bf16), saved_of_bf16 = trained_as(Widened, (64, 64), "bf16")
    assert torch.equal(weight, of_bf16)
    assert torch.equal(bias, bias_of_bf16)
    assert saved <= saved_of_bf16


def test_beside_a_users_checkpoint_the_passes_choose_too(who_cuts: list[str]) -> None:
    inner, last = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 16)

    def model(x: Tensor) -> Tensor:
        return last(checkpoint(inner, x, use_reentrant=False))

    torch.compile(model, backend=eager_backend(recipe="fp8"))(torch.randn(8, 16)).sum().backward()
    assert who_cuts == ["cut"]
