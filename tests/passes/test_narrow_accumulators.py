"""Pass narrow-accumulators: every GEMM, forward and backward, adds up in the format asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from one_pass import run_pass
from torch import Tensor, nn

from fxprec import Accumulator
from fxprec.kernels import accumulators
from fxprec.passes.analysis import ops

aten = torch.ops.aten
NAME = "narrow-accumulators"
OPTIONS = {"storage": "simulate", "accumulator": "1-6-9"}


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def test_each_product_of_both_halves_takes_the_format() -> None:
    accumulator = Accumulator(format="1-6-9", kahan=True, chunk=8)
    ran = run_pass(NAME, linears(), torch.randn(5, 4), storage="simulate", accumulator=accumulator)
    assert ran.halves(accumulators.MATMUL) == (2, 3)
    assert {n.args[2:] for n in ran.nodes(accumulators.MATMUL)} == {("fp32", "1-6-9", True, 8)}
    assert not any(n.target in ops.GEMMS | ops.GEMMS_BACKWARD for n in ran.graph.nodes)
    assert ran.work.remarks == ["GEMMs add up in 1-6-9, with Kahan's compensation, in chunks of 8"]
    assert ran.work.notices == []


def test_a_bias_is_added_in_float32_and_factors_multiply_the_product() -> None:
    def function(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(bias, a, b, alpha=2, beta=0.5)

    args = (torch.randn(3), torch.randn(5, 4), torch.randn(4, 3, requires_grad=True))
    ran = run_pass(NAME, function, *args, **OPTIONS)
    (added,) = ran.nodes(aten.add.Tensor)
    doubled, halved = added.args
    assert (doubled.args[0].target, doubled.args[1], halved.args[1]) == (accumulators.MATMUL, 2, 0.5)


def test_a_convolutions_gradients_are_sums_too_and_its_bias_gradient_is_not() -> None:
    ran = run_pass(NAME, nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6, requires_grad=True), **OPTIONS)
    assert ran.halves(accumulators.CONVOLUTION) == (1, 0)
    assert ran.halves(accumulators.CONVOLUTION_BACKWARD) == (0, 1)
    (bias,) = ran.nodes(aten.sum.dim_IntList)
    assert bias.args[1] == [0, 2, 3]
    assert bias.meta["val"].shape == (4,)


def test_fused_attention_keeps_its_own_and_the_user_is_told() -> None:
    def function(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    ran = run_pass(NAME, function, torch.randn(1, 2, 4, 8, requires_grad=True), **OPTIONS)
    assert len(ran.work.notices) == 2, "forward and backward"
    for notice in ran.work.notices:
        assert "keeps its own accumulator, not 1-6-9; torch.nn.attention.sdpa_kernel" in notice.detail


def test_without_the_option_nothing_changes() -> None:
    ran = run_pass(NAME, linears(), torch.randn(5, 4), storage="simulate")
    assert ran.is_unchanged()
    assert ran.work.remarks == []
