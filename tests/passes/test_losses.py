"""What only the loss is computed from keeps its own dtype: gradients near convergence are those of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend
from models import Parts
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
Loss = Callable[[Tensor, Tensor], Tensor]
End = Callable[[Tensor, Tensor], Any]


def structural_similarity(a: Tensor, b: Tensor) -> Tensor:
    def mean(x: Tensor) -> Tensor:
        return F.avg_pool1d(x[:, None], 5, 1)[:, 0]

    ma, mb = mean(a), mean(b)
    va, vb, both = mean(a * a) - ma * ma, mean(b * b) - mb * mb, mean(a * b) - ma * mb
    return 1 - ((2 * ma * mb + 1e-4) * (2 * both + 9e-4) / ((ma * ma + mb * mb + 1e-4) * (va + vb + 9e-4))).mean()


def correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(0), b - b.mean(0)
    return 1 - (a * b).sum() / ((a * a).sum() * (b * b).sum()).sqrt()


def log_ratio(a: Tensor, b: Tensor) -> Tensor:
    difference = b.log_softmax(1) - a.log_softmax(1)
    return (difference.exp() - difference - 1).mean()


LOSSES: dict[str, Loss] = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "a sum of squares": lambda a, b: (a - b).square().sum(),
    "a smooth distance": lambda a, b: ((a - b).square() + 1e-6).sqrt().mean(),
    "cosine_embedding_loss": lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(64)),
    "normalized": lambda a, b: (2 - 2 * (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1)).mean(),
    "cross_entropy, soft targets": lambda a, b: F.cross_entropy(a, b.softmax(1)),
    "kl_div": lambda a, b: F.kl_div(a.log_softmax(1), b.log_softmax(1), log_target=True, reduction="batchmean"),
    "binary, soft targets": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
    "poisson_nll_loss": lambda a, b: F.poisson_nll_loss(a, b.exp()),
    "a log ratio": log_ratio,
    "a correlation": correlation,
    "a structural similarity": structural_similarity,
}


def gradient(loss: Loss, prediction: Tensor, target: Tensor, recipe: str = "", recompute: bool = False) -> Tensor:
    """Return the gradient of what the prediction is computed from, in float64; plain torch's without a recipe."""
    scale = torch.ones_like(prediction).requires_grad_()

    def model(scale: Tensor, prediction: Tensor, target: Tensor) -> Tensor:
        run = lambda a, b: loss(a * scale, b)  # noqa: E731
        return checkpoint(run, prediction, target, use_reentrant=False) if recompute else run(prediction, target)

    step = compiled(model, eager_backend(recipe=recipe, low_ratio=1.0)) if recipe else model
    (found,) = torch.autograd.grad(step(scale, prediction, target), scale)
    return found.double()


@pytest.mark.parametrize("name", LOSSES)
def test_near_convergence_the_gradient_is_float32s(name: str) -> None:
    target = torch.randn(64, 16).bfloat16().float()
    prediction = (target + 0.02 * torch.randn(64, 16)).bfloat16().float()
    exact = gradient(LOSSES[name], prediction.double(), target.double())
    own = (gradient(LOSSES[name], prediction, target) - exact).norm() / exact.norm()
    for recipe in ("fp8", "bf16"):
        found = gradient(LOSSES[name], prediction, target, recipe)
        assert (found - exact).norm() / exact.norm() < 4 * own + 1e-6, recipe


@pytest.mark.parametrize("name", ["mse_loss", "normalized"])
def test_a_checkpointed_loss_too(name: str) -> None:
    target = torch.randn(64, 16).bfloat16().float()
    prediction = (target + 0.02 * torch.randn(64, 16)).bfloat16().float()
    exact = gradient(LOSSES[name], prediction.double(), target.double())
    found = gradient(LOSSES[name], prediction, target, "fp8", recompute=True)
    assert (found - exact).norm() < 1e-4 * exact.norm()


def network_of(end: End) -> nn.Module:
    """Two layers, and what follows them."""
    layers = {"first": nn.Linear(16, 32), "last": nn.Linear(32, 8), "queue": nn.Buffer(torch.randn(8, 64))}
    return Parts(lambda m, x: end(m.last(F.gelu(m.first(x))), m.queue), **layers)


def own_and_low(step: Callable[..., Any], *inputs: Any) -> tuple[set[str], set[str]]:
    """Return the tensors that keep float32 because of the loss, and those saved in 8 bits."""
    backend = eager_backend(recipe="fp8", low_ratio=1.0)
    out = compiled(step, backend)(*inputs)
    (out[-1] if isinstance(out, tuple) else out).sum().backward()
    sites = backend.plans[0].sites
    own = {s.tensor for s in sites if "only the loss is computed from it" in s.why and s.format == "fp32"}
    return own, {s.tensor for s in sites if s.format == "e4m3fn"}


def to_the_first(similarities: Tensor) -> Tensor:
    return F.cross_entropy(similarities, torch.zeros(48, dtype=torch.long))


LAYERS = {"x", "addmm"}  # the data, and the first layer's result, from which the second's operand is recomputed


@pytest.mark.parametrize(
    ("end", "own"),
    [
        (lambda p, queue: p.sigmoid().square().mean(), {"addmm_1", "sigmoid"}),
        (lambda p, queue: to_the_first(F.normalize(p, dim=1) @ queue), {"addmm_1", "div", "mm"}),
        (lambda p, queue: to_the_first(F.normalize(p, dim=1) @ p.T), {"addmm_1", "div", "mm"}),
        (lambda p, queue: (p.sin(), p.tanh().square().mean()), {"addmm_1", "tanh"}),
    ],
    ids=["a result", "similarities with a buffer", "similarities of two results", "a result that is also returned"],
)
def test_what_leads_to_the_loss_alone_keeps_its_dtype_and_layers_are_saved_in_8_bits(end: End, own: set[str]) -> None:
    assert own_and_low(network_of(end), torch.randn(48, 16)) == (own, LAYERS)


@pytest.mark.parametrize("last", ["frozen", "normalized", "given"])
def test_a_layer_is_none_of_the_loss(last: str) -> None:
    """Whether its weight is frozen, divided by a norm that a matrix product finds, or an input of the graph."""
    network = network_of(lambda p, queue: p.sigmoid().square().mean())
    step: Callable[..., Tensor] = network
    if last == "normalized":
        spectral_norm(network.last)
    if last == "frozen":
        network.last.requires_grad_(False)
    if last == "given":
        weights = dict(network.named_parameters())
        step = lambda x: torch.func.functional_call(network, weights, (x,))  # noqa: E731
    own, low = own_and_low(step, torch.randn(48, 16))
    assert len(own) == 2, "the last layer's result and its sigmoid"
    assert "sigmoid" in own
    assert low >= {"x", "addmm"}


def test_a_piece_of_a_network_has_no_loss() -> None:
    own, low = own_and_low(network_of(lambda p, queue: F.gelu(p)), torch.randn(48, 16))
    assert (own, low) == (set(), LAYERS | {"addmm_1"})
