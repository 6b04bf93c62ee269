"""Gradient scaling end to end: what it saves and what it keeps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend
from scaled_models import TINY, data, grads, mlp
from torch import nn

import fxprec
from fxprec import GradScaling
from fxprec.runtime.scaling.keeper import PATIENCE

STEPS = 200
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does it
]


def train(model: nn.Module, function, steps: int, factor: float = 1.0, lr: float = 0.2) -> list[float]:
    """SGD on ``factor`` times the loss, with the learning rate undoing the factor."""
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), lr / factor, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(function(x), y)
        (loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def underflows(backend: fxprec.Backend) -> dict[str, float]:
    """What underflowed in the last step: the share of all elements, and the worst share of one gradient."""
    rows = [r for r in backend.stats() if r["kind"] == "grad_output" and r["underflow_ratio"] is not None]
    elements = [backend.plans[0].sites[r["site"]].elements for r in rows]
    lost = sum(r["underflow_ratio"] * n for r, n in zip(rows, elements, strict=True))
    return {"mean": lost / sum(elements), "worst": max(r["underflow_ratio"] for r in rows)}


@pytest.mark.parametrize("storage", ["simulate", "native"])
def test_gradients_of_1e_9_train_as_in_fp32_with_scaling_and_not_at_all_without(storage: str) -> None:
    wanted = train(plain := mlp(), plain, STEPS)
    results, shares = {}, {}
    for scaling in ("none", "auto", GradScaling(estimate="histogram")):
        model = mlp()
        backend = eager_backend("fp16", storage=storage, grad_scaling=scaling)
        results[str(scaling)] = train(model, compiled(model, backend), STEPS, TINY)
        shares[str(scaling)] = underflows(backend)
    none, *scaled = results
    assert shares[none]["worst"] > 0.9, "and behind it all is zero"
    assert results[none][-1] > 0.95 * results[none][0], "nothing was learnt"
    for name in scaled:
        assert shares[name]["mean"] <= 1e-3
        assert results[name][-1] == pytest.approx(wanted[-1], rel=0.01)


@pytest.mark.parametrize("k", [-100, 60])
def test_where_gradients_are_not_stored_the_scale_of_the_loss_does_not_matter_at_all(k: int) -> None:
    """A CPU's GEMMs multiply gradients as they are: nothing is scaled, from step one on."""
    found = []
    for factor in (1.0, 2.0**k):
        model = mlp()
        backend = eager_backend("hfp8", storage="packed", low_ratio=1.0)
        found.append(gradients_of(model, compiled(model, backend), factor))
        assert not any(r["scale_exponent"] or r["history"] for r in backend.stats())
        assert {s.reads for s in backend.plans[0].sites if s.kind == "grad_output"} == {"all"}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("estimate", ["statistical", "histogram"])
def test_step_two_is_scaled(estimate: str) -> None:
    """Also where a whole model lies behind gradients that all underflowed in step one."""
    model = mlp()
    backend = eager_backend("fp16", storage="simulate", grad_scaling=GradScaling(estimate=estimate))
    train(model, compiled(model, backend), 2, 1e-8)
    assert underflows(backend)["mean"] <= 1e-2
    assert all(p.grad is None or p.grad.abs().max() > 0 for p in model.parameters())


def test_stats_show_estimates_beside_measurements_over_time() -> None:
    model = mlp()
    backend = eager_backend("fp16", storage="packed", grad_scaling=GradScaling(interval=5))
    train(model, compiled(model, backend), 23, 1e-3)
    rows = [r for r in backend.stats() if r["kind"] == "grad_output"]
    assert len(rows) == 3
    for row in rows:
        steps = [entry["step"] for entry in row["history"]]
        assert steps[0] == 1
        assert steps == sorted(set(steps))
        assert len([s for s in steps if s > 8]) >= 2, "once an interval"
        last = row["history"][-1]
        assert last["scale_exponent"] == row["scale_exponent"] != 0
        assert 0 <= row["estimated_underflow"] <= 1e-3
        assert last["measured_underflow"] <= 5e-3
        assert row["estimated_overflow"] < 1e-3
    kinds = {e.kind for e in backend.events}
    assert "scale" in kinds


def test_refresh_scales_measures_in_the_coming_step() -> None:
    model = mlp()
    backend = eager_backend("fp16", storage="simulate", grad_scaling=GradScaling(interval=10_000))
    function = compiled(model, backend)
    train(model, function, 12)

    def refreshes() -> list[int]:
        return [e["step"] for r in backend.stats() if r["kind"] == "grad_output" for e in r["history"]]

    assert max(refreshes()) < 12
    backend.refresh_scales()
    train(model, function, 2)
    assert max(refreshes()) == 13
    assert backend.skipped_steps == 0


def test_a_gradient_beyond_the_range_saturates_is_counted_and_scaled_down() -> None:
    model = mlp()
    backend = eager_backend("fp16", storage="simulate")
    function = compiled(model, backend)
    x, _ = data()
    for _ in range(3):
        function(x).square().mean().backward()
    function(x).square().mean().mul(1e12).backward()
    rows = [r for r in backend.stats() if r["kind"] == "grad_output"]
    assert max(r["overflow_ratio"] for r in rows) > 0.01
    assert all(g.isfinite().all() for g in grads(model))
    for _ in rows:  # what saturates hides how large the gradients behind it are: one after the other
        model.zero_grad()
        function(x).square().mean().mul(1e12).backward()
    assert max(r["overflow_ratio"] for r in backend.stats() if r["kind"] == "grad_output") == 0.0


def gradients_of(model: nn.Module, function, factor: float) -> list[torch.Tensor]:
    """Gradients for a loss times ``factor``, the factor taken off again in float64."""
    model.zero_grad()
    (function(data(64)[0]).square().mean() * factor).backward()
    return [g.double() / factor for g in grads(model)]


def test_the_scale_of_the_loss_does_not_matter_from_the_first_step_on() -> None:
    """From 2**-100 to 2**100: the same bits where the exponents moved as much, else the format's error."""
    found, exps = {}, {}
    for k in (0, *range(-100, 101, 40)):
        model = mlp()
        backend = eager_backend("hfp8", storage="simulate", low_ratio=1.0)
        function = compiled(model, backend)
        first = gradients_of(model, function, 2.0**k)
        second = gradients_of(model, function, 2.0**k)
        for _ in range(3):
            found[k] = gradients_of(model, function, 2.0**k)
        exps[k] = [r["scale_exponent"] + k for r in backend.stats() if r["kind"].startswith("grad")]
        for begun in (first, second):
            assert all(float((a - b).norm() / b.norm()) < 0.1 for a, b in zip(begun, found[k], strict=True)), k
        assert {e.kind for e in backend.events} <= {"scale"}
    for k, gradient in found.items():
        for a, b in zip(gradient, found[0], strict=True):
            assert torch.equal(a, b) if exps[k] == exps[0] else float((a - b).norm() / b.norm()) < 0.1, k
    assert sum(e == exps[0] for e in exps.values()) >= 2


@pytest.mark.parametrize("recipe", ["fp16", "hfp8"])
@pytest.mark.parametrize("loss", ["targets", "given count", "mean", "squares", "outside"])
def test_the_first_step_loses_no_more_than_later_ones(loss: str, recipe: str) -> None:
    """Its gradients are 2,048 times smaller than those of one element, and nothing is measured yet."""
    model = _WithLoss(loss)
    reference, backend = copy.deepcopy(model), eager_backend(recipe, storage="simulate")
    function = compiled(model, backend)
    x, targets, count = torch.randn(2048, 16), torch.randint(0, 32, (2048,)), torch.tensor(2048.0)

    def gradients(of: nn.Module, run) -> list[torch.Tensor]:
        of.zero_grad()
        found = run(x, targets, count)
        (F.cross_entropy(found, targets) if loss == "outside" else found).backward()
        return [g.clone() for g in grads(of)]

    wanted = gradients(reference, reference)
    first, *_, later = [gradients(model, function) for _ in range(5)]

    def error(found: list[torch.Tensor]) -> float:
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))

    assert error(first) <= 1.2 * error(later)
    assert "unscaled" not in {e.kind for e in backend.events}


class _WithLoss(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss, self.first, self.last = loss, nn.Linear(16, 32), nn.Linear(32, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))

    def forward(self, x: torch.Tensor, targets: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for norm in self.norms:  # its backward multiplies by the width, and divides by it elsewhere
            x = x + F.gelu(norm(x))
        x = self.last(x)
        match self.loss:
            case "targets":
                return F.cross_entropy(x, targets)
            case "given count":
                return F.cross_entropy(x, targets, reduction="sum") / count
            case "mean":
                return F.binary_cross_entropy_with_logits(x, torch.zeros_like(x))
            case "squares":
                return F.mse_loss(x, torch.zeros_like(x))
        return x


def test_of_two_forwards_before_the_first_backward_each_takes_off_its_own_scales() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    function, x = compiled(model, eager_backend("hfp8", storage="simulate", low_ratio=1.0)), data(64)[0]
    losses = [function(part).square().mean() for part in (x[:32], x[32:])]
    for loss in losses:
        loss.backward()
    for part in (x[:32], x[32:]):
        reference(part).square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.2 * q.grad.norm()


def test_a_first_loss_of_zero_chooses_no_scale() -> None:
    model = mlp()
    backend = eager_backend("hfp8", storage="simulate", low_ratio=1.0)
    function = compiled(model, backend)
    gradients_of(model, function, 0.0)
    assert not any(r["scale_exponent"] for r in backend.stats())
    first = gradients_of(model, function, 2.0**-40)
    for _ in range(3):
        later = gradients_of(model, function, 2.0**-40)
    assert all(float((a - b).norm() / b.norm()) < 0.1 for a, b in zip(first, later, strict=True))


def test_a_loss_that_changes_suddenly_is_followed_and_a_scale_out_of_reach_is_told() -> None:
    model = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 4))
    backend = eager_backend("hfp8", storage="simulate", low_ratio=1.0)
    function, x = compiled(model, backend), torch.randn(64, 8)

    def gradients(k: int) -> list[torch.Tensor]:
        model.zero_grad()
        (function(x).square().mean() * 2.0**k).backward()
        return [g.double() * 2.0**-k for g in grads(model)]

    def error(k: int) -> float:
        return max(float((a - b).norm() / b.norm()) for a, b in zip(gradients(k), wanted, strict=True))

    for _ in range(4):
        wanted = gradients(0)
    gradients(50)
    assert error(50) < 0.2, "however many layers the first gradient hid"
    errors = [error(-50) for _ in range(PATIENCE + 3)]
    assert errors[0] > 0.9
    assert errors[-1] < 0.2, "what is small for long is measured anew, whatever came before"
    words = r"scale 2\*\*\d+ is needed and 2\*\*126 is used.*underflows; multiply the loss"
    with pytest.warns(fxprec.FxprecWarning, match=words):
        errors = [error(-124) for _ in range(PATIENCE + 4)]
    assert "clamp" in {e.kind for e in backend.events}


def test_losses_that_take_turns_do_not_cost_the_larger_its_gradients() -> None:
    """As in accumulation, or with a discriminator: the scale has room for the largest of the last steps."""
    model = mlp()
    reference, x = copy.deepcopy(model), data(64)[0]
    function = compiled(model, eager_backend("hfp8", storage="simulate", low_ratio=1.0))
    for step in range(9):
        for one, called in ((model, function), (reference, reference)):
            one.zero_grad()
            (called(x).square().mean() * (1e-12 if step % 3 else 1.0)).backward()
        if step in (3, 6):
            for a, b in zip(grads(model), grads(reference), strict=True):
                assert float((a - b).norm() / b.norm()) < 0.3, step


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("recipe", "storage", "estimate"), [("fp16", "packed", "statistical"), ("hfp8", "simulate", "histogram")]
)
def test_compiled_code_scales_as_the_reference_does(recipe: str, storage: str, estimate: str) -> None:
    """The same exponents and, up to how GEMMs add, the same gradients."""
    x, y = data()
    found = {}
    for lowering in ("eager", "auto"):
        model = mlp()
        backend = eager_backend(
            recipe,
            storage=storage,
            low_ratio=None if recipe == "fp16" else 1.0,
            lowering=lowering,
            grad_scaling=GradScaling(estimate=estimate, interval=2),
        )
        function = compiled(model, backend)
        for _ in range(4):
            model.zero_grad()
            F.mse_loss(function(x), y).mul(TINY).backward()
        found[lowering] = grads(model), [r["scale_exponent"] for r in backend.stats()]
    assert found["auto"][1] == found["eager"][1]
    assert any(found["auto"][1])
    for a, b in zip(found["auto"][0], found["eager"][0], strict=True):
        assert float((a - b).norm()) <= 1e-3 * float(b.norm())
