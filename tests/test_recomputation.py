"""Dropout and checkpoints: what is recomputed in backward is what forward computed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from backend_helpers import FINE_TOLERANCE, eager_backend, relative_error
from models import Apply, Checkpointed, FeedForward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxprec import Backend, FxprecWarning, LoweringError


class Masked(nn.Module):
    """Returns the mask too, so that a copy without random numbers can be given it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def part(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.a(x))
        if mask is None:
            mask = F.dropout(torch.ones_like(x), 0.25)
        return self.b(x * mask), mask

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, mask = checkpoint(self.part, x, mask, use_reentrant=False)
        return self.c(x), mask


def step(model: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Return the mask and the gradients."""
    out, used = model(x, mask)
    found = torch.autograd.grad((out * torch.arange(4.0)).sum(), list(model.parameters()))
    return used.detach(), list(found)


def test_what_a_region_starts_from_is_saved_as_the_product_wrote_it() -> None:
    """It was widened before, and saved in float32: twice what autocast saves."""
    backend = eager_backend("native", recipe="bf16", low_ratio=None)
    region = Checkpointed(nn.GELU(), nn.Linear(256, 256), nn.GELU())
    model = nn.Sequential(nn.Linear(256, 256), region, nn.Linear(256, 256))
    torch.compile(model, backend=backend)(torch.randn(64, 256)).square().mean().backward()
    start = next(saved for saved in backend.plans[0].saved if saved.tensor == "addmm")
    assert (start.format, start.bytes) == ("bf16", 2 * 64 * 256)


@pytest.mark.parametrize("options", [{}, {"policy": "exact"}], ids=str)
def test_a_recomputed_dropout_draws_the_mask_of_the_forward(options: dict[str, Any]) -> None:
    model, x = Masked(), torch.randn(256, 16)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=eager_backend("packed", **options))
    masks = []
    for _ in range(2):
        mask, found = step(compiled, x)
        for a, b in zip(found, step(reference, x, mask)[1], strict=True):
            assert relative_error(a, b) < FINE_TOLERANCE
        masks.append(mask)
    assert not torch.equal(*masks), "each step draws anew"
    kept = torch.cat(masks) > 0
    assert 0.74 < kept.float().mean() < 0.76, "32768 draws of probability 0.75: four standard deviations are 0.0096"
    torch.manual_seed(5)
    first = step(compiled, x)[0]
    torch.manual_seed(5)
    assert torch.equal(first, step(compiled, x)[0])


@pytest.mark.parametrize("budget", [0.3, 0.0])
def test_a_memory_budget_draws_no_mask_anew(budget: float) -> None:
    """Inductor itself does, in torch 2.13: the seed is recomputed in backward, as another."""
    model, x = Masked(), torch.randn(32, 16)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=eager_backend("packed"))
    with functorch_config.patch(activation_memory_budget=budget):
        mask, found = step(compiled, x)
    for a, b in zip(found, step(reference, x, mask)[1], strict=True):
        assert relative_error(a, b) < FINE_TOLERANCE


def attention_with_dropout(h: Tensor) -> Tensor:
    q = h.view(4, -1, 4, 16).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.25).transpose(1, 2).reshape(h.shape)


RANDOM = {
    "dropout": nn.Dropout(0.25),
    "attention": Apply(attention_with_dropout),
    "noise": Apply(lambda h: h * (1 + torch.randn_like(h))),
}


def gradients(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    (call(x) * torch.arange(4.0)).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("kind", "reentrant"), [("dropout", False), ("attention", True), ("noise", False)])
def test_a_seed_gives_the_gradients_that_it_gives_uncompiled(kind: str, reentrant: bool) -> None:
    """In the calibration step of ``policy="exact"``, in the next one, and so under the lowering ``eager``."""
    model, x = nn.Sequential(nn.Linear(16, 64), RANDOM[kind], nn.Linear(64, 4)), torch.randn(64, 16, requires_grad=True)
    reference = copy.deepcopy(model)
    compiled = torch.compile(
        lambda v: checkpoint(model, v, use_reentrant=reentrant),
        backend=eager_backend("packed", policy="exact", low_ratio=0.0),
    )
    wanted = gradients(reference, reference, x)
    with inductor_config.patch(fallback_random=True):  # torch's own generator, in torch's own order
        for bound in (1e-5, FINE_TOLERANCE):
            for a, b in zip(gradients(model, compiled, x), wanted, strict=True):
                assert relative_error(a, b) < bound


class Attending(nn.Module):
    """Attention that drops nothing: torch tags it as random all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).view(8, 64, 3, 2, 32).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x


def saved_under(budget: float, model: nn.Module, x: Tensor, **options: Any) -> int:
    torch.compiler.reset()
    backend = eager_backend("native", **{"recipe": "fp8"} | options)
    with functorch_config.patch(activation_memory_budget=budget):
        torch.compile(model, backend=backend)(x).sum().backward()
    saved = backend.plans[0].saved_bytes
    assert saved is not None
    return saved.planned


HOLDS_MORE = r"activation_memory_budget=0\.\d: .* wait for backward, .* the step holds .* Give peak_budget"


def test_a_memory_budget_is_a_bound() -> None:
    model, x = Attending(), torch.randn(8, 64, 64)
    whole = saved_under(1.0, model, x)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", HOLDS_MORE, FxprecWarning
        )  # whether the peak is kept too follows torch's graph
        assert 0 < saved_under(0.2, model, x) <= 0.2 * whole


def convolutions() -> nn.Module:
    """Norms and ReLUs, which the fastest choice computes again from a few values, all at the start of backward."""
    layers = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def test_a_memory_budget_takes_a_choice_whose_peak_is_no_higher_than_without_it() -> None:
    """A warning, which is an error in tests, would say that the step holds more."""
    model, x = convolutions(), torch.randn(4, 16, 16, 16, requires_grad=True)
    whole, half = (saved_under(budget, model, x, recipe="bf16", low_ratio=None) for budget in (1.0, 0.5))
    copied = 2 * x.numel()  # of the input, which the budget does not count
    assert 0 < half - copied <= 0.5 * (whole - copied)


def test_a_memory_budget_whose_peak_is_higher_than_without_it_says_so() -> None:
    model, x = convolutions(), torch.randn(4, 16, 16, 16, requires_grad=True)
    with pytest.warns(FxprecWarning, match=HOLDS_MORE):
        saved_under(0.1, model, x)


def test_a_memory_budget_bounds_what_is_saved_beside_a_checkpoint() -> None:
    model, x = nn.Sequential(Checkpointed(Attending()), Attending()), torch.randn(8, 64, 64)
    whole = saved_under(1.0, model, x)
    assert 0 < saved_under(0.4, model, x) <= 0.4 * whole


def counts() -> nn.Module:
    """What backward needs of each layer was drawn, and without a seed: it has to be saved."""
    drawn = Apply(lambda x: x * torch.poisson(torch.ones_like(x)))
    return nn.Sequential(nn.Linear(16, 64), drawn, nn.Linear(64, 64), drawn)


def test_a_memory_budget_that_is_not_met_names_what_is_saved() -> None:
    with pytest.warns(
        FxprecWarning, match=r"activation_memory_budget=0\.1: .* are saved .* the largest is poisson"
    ) as told:
        saved_under(0.1, counts(), torch.randn(1024, 16))
    assert len(told) == 1
    assert "torch.utils.checkpoint around a module" in str(told[0].message)


def train_blocks(
    reentrant: bool | None, *, steps: int = 4, saving: Callable[[], Any] = nullcontext
) -> tuple[list[Tensor], Backend]:
    """Two micro-batches in flight, three compiled blocks, each with a plan of its own, loud in steps 2 and 3: promotions come between the two forwards."""
    torch.compiler.reset()
    torch.manual_seed(0)
    backend = eager_backend("native", recipe="fp8", low_ratio=1.0)
    blocks = nn.ModuleList(FeedForward(16, 16) for _ in range(3))
    compiled = [_under(saving, torch.compile(block, backend=backend)) for block in blocks]
    for i in range(steps):
        outputs = []
        for _ in range(2):
            x = (torch.randn(8, 16) * (1e5 if i in (1, 2) else 1)).requires_grad_()
            for block in compiled:
                x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            outputs.append(x)
        for out in outputs:
            (out * 1e-5).sum().backward()
    return [p.grad for p in blocks.parameters()], backend


def _under(saving: Callable[[], Any], block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with saving():
            x = block(x)
        return F.leaky_relu(x)  # whose input the checkpoint itself keeps

    return call


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize("saving", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_checkpoint_around_compiled_blocks_repeats_what_forward_did(saving: Callable[[], Any]) -> None:
    """The same gradients, steps, promotions and scales as without: a recomputation takes part in nothing.

    Also where other hooks on saved tensors are between the checkpoint and the block.
    """
    wanted, plain = train_blocks(None)
    found, backend = train_blocks(False, saving=saving)
    assert [c.step for c in backend.controllers] == [c.step for c in plain.controllers] == [4 * 2] * 3
    assert all(len(plan.promoted) > 0 for plan in backend.plans)
    assert [plan.sites for plan in backend.plans] == [plan.sites for plan in plain.plans]
    assert [(e.step, e.kind, e.site) for e in backend.events] == [(e.step, e.kind, e.site) for e in plain.events]
    assert [c.latest for c in backend.controllers] == [c.latest for c in plain.controllers]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


class _OfAnotherTorch(torch.autograd.graph.saved_tensors_hooks):
    """A checkpoint's hook whose variables have other names."""

    def __init__(self, holder: object) -> None:
        def pack_hook(x: Tensor) -> Tensor:
            assert holder is not None
            return x

        pack_hook.__module__ = torch.utils.checkpoint.__name__
        super().__init__(pack_hook, lambda x: x)


def test_a_checkpoint_that_torch_keeps_in_another_way_is_refused() -> None:
    """Without the forward's version a recomputation would run with newer scales, and nobody would see."""
    backend = eager_backend("native", recipe="fp8", low_ratio=1.0)
    block = torch.compile(FeedForward(16, 16), backend=backend)
    with _OfAnotherTorch(object()), pytest.raises(LoweringError) as told:
        block(torch.randn(8, 16))
    assert str(told.value).startswith(
        f"torch {torch.__version__} keeps a checkpoint in a way that this fxprec does not"
    )
    assert "(holder)" in str(told.value)
    assert str(told.value).endswith("checkpoint inside of the compiled module")
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert hooks is None


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_a_reentrant_checkpoint_counts_each_half_once() -> None:
    """Its forward runs without gradients, in a graph of its own; the training graph runs in backward only."""
    found, backend = train_blocks(True)
    assert [graph.is_training for graph in backend._graphs] == [False] * 3 + [True] * 3
    assert [c.step for c in backend.controllers] == [4 * 2] * 6
    assert [len(plan.promoted) > 0 for plan in backend.all_plans] == [False] * 3 + [True] * 3, (
        "evaluation stores nothing"
    )
    assert all(gradient.isfinite().all() for gradient in found)
