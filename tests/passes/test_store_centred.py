"""Pass store-centred: what a norm's backward reads is stored less its mean, where forward computes that difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from one_pass import Ran, run_pass
from torch import Tensor, nn

from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.passes.analysis.joint import is_backward
from tests.helpers import compiled, eager_backend

NAME, SUB = "store-centred", torch.ops.aten.sub.Tensor
IMAGES = torch.randn(4, 3, 6, 6)


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm, nn.ReLU())


def stored(ran: Ran) -> dict[str, str]:
    """By the tensor of the site: which operator made what is stored of it."""
    sites = ran.work.book.sites
    casts = Quantize.among(Quantize.nodes(ran.graph))
    return {sites[c.row].tensor: str(c.x.target).partition(".")[2] for q, c in casts if not is_backward(q)}


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(8), nn.InstanceNorm2d(8), nn.LayerNorm([4, 4])], ids=lambda n: type(n).__name__
)
def test_the_copy_stands_behind_the_subtraction(norm: nn.Module) -> None:
    ran = run_pass(NAME, normed(norm), IMAGES)
    assert stored(ran)["convolution"] == "sub.Tensor"
    backward = [n for n in ran.nodes(SUB) if is_backward(n)]
    assert not [n for n in backward if any(Dequantize.match(a) for a in n.all_input_nodes)], "it is subtracted once"
    (read,) = [
        x
        for q, _ in Quantize.among(Quantize.nodes(ran.graph))
        for x, _ in Dequantize.among(q.users)
        if q.args[0].target is SUB
    ]
    assert all(is_backward(user) for user in read.users)
    assert "1 tensor is stored less its mean, which is what backward reads" in ran.work.remarks


def by_hand(h: Tensor) -> Tensor:
    """A layer norm as models write it out: the backward of ``std`` computes the mean anew."""
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-5)


def by_variance(h: Tensor) -> Tensor:
    return (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True, correction=0) + 1e-5)


def deviations(h: Tensor) -> Tensor:
    """Forward computes neither the mean nor the difference."""
    return h.std(-1) + h.var(-1)


@pytest.mark.parametrize("function", [by_hand, by_variance, deviations])
def test_what_the_backward_of_a_deviation_reads_is_stored_once_less_its_mean(
    function: Callable[[Tensor], Tensor],
) -> None:
    weight = torch.randn(8, 3, 3, 3, requires_grad=True)
    ran = run_pass(NAME, lambda x, w: function(F.conv2d(x, w)).square(), IMAGES, weight)
    made = [c.x for q, c in Quantize.among(Quantize.nodes(ran.graph)) if not is_backward(q)]
    assert [x.target for x in made if x.meta["val"].shape == (4, 8, 4, 4)].count(SUB) == 1
    means = [n for n in ran.nodes(torch.ops.aten.mean.dim) if not is_backward(n)]
    assert len(means) == 1
    backward = [n for n in ran.graph.nodes if is_backward(n) and n.target in (SUB, torch.ops.aten.mean.dim)]
    assert not [n for n in backward if any(Dequantize.match(a) for a in n.all_input_nodes)]


def test_two_norms_of_one_tensor_subtract_one_mean() -> None:
    def model(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = F.conv2d(x, w)
        return F.layer_norm(h, (4, 4), a).relu() * F.layer_norm(h, (4, 4), b).sigmoid()

    factors = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    ran = run_pass(NAME, model, IMAGES, torch.randn(8, 3, 3, 3, requires_grad=True), *factors)
    assert stored(ran)["convolution"] == "sub.Tensor"
    assert "1 tensor is stored less its mean, which is what backward reads" in ran.work.remarks
    assert len([n for n in ran.nodes(SUB) if not is_backward(n)]) == 1, "both results are computed from what is stored"


MODELS: dict[str, Callable[[Tensor], Tensor]] = {
    "read otherwise too": lambda h: F.batch_norm(h, None, None, training=True) + h.square(),
    "no mean": lambda h: F.rms_norm(h, (4, 4)).relu(),
    "of one size": lambda h: (h - h.flip(0)).square(),
    "a deviation of what is read otherwise too": lambda h: h.std(-1, keepdim=True) * h,
    "deviations over different dimensions": lambda h: h.std(-1, keepdim=True) * h.std(1, keepdim=True),
    "group norm, whose backward reads it whole": lambda h: F.group_norm(h, 2).relu(),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_backward_reads_as_it_is_stays_as_it_is(name: str) -> None:
    weight = torch.randn(8, 3, 3, 3, requires_grad=True)
    ran = run_pass(NAME, lambda x, w: MODELS[name](F.conv2d(x, w)), IMAGES, weight)
    assert ran.is_unchanged()


def test_two_means_are_not_taken_for_one() -> None:
    """Backward subtracts each from a copy of its own, so there is no one difference to store."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        h = F.conv2d(x, w)
        return F.layer_norm(h, (4, 4)).relu() * F.batch_norm(h, None, None, training=True).relu()

    ran = run_pass(NAME, model, IMAGES, torch.randn(8, 3, 3, 3, requires_grad=True))
    assert ran.is_unchanged()


def test_evaluation_is_left_alone() -> None:
    with torch.no_grad():
        assert run_pass(NAME, normed(nn.BatchNorm2d(8)), IMAGES).is_unchanged()


NORMS = {"batch": nn.BatchNorm1d(32), "layer": nn.LayerNorm(32), "by hand": by_hand, "by variance": by_variance}


@pytest.mark.parametrize("name", NORMS)
def test_a_large_mean_does_not_drown_the_gradient(name: str) -> None:
    """30 deviations; the error is that of a mean of 0 (some 0.15 of the gradient, of 8 rows), and was above 1."""
    norm, layer, x = NORMS[name], nn.Linear(16, 32), torch.randn(8, 16)

    def model(x: Tensor) -> Tensor:
        return F.gelu(norm(layer(x) + 20))

    (exact,) = torch.autograd.grad(model(x).sum(), layer.weight)
    backend = eager_backend("fp8", low_ratio=1.0)
    (got,) = torch.autograd.grad(compiled(model, backend)(x).sum(), layer.weight)
    assert "stored less its mean" in str(backend.plans[0].notes)
    assert (got - exact).norm() <= 0.25 * exact.norm()
