"""Stored casts: what is kept for backward is the stored copy and only it, and nothing else is rounded."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from cifar import short_resnet
from helpers import compiled, eager_backend
from one_pass import run_pass

from fxprec.ir import symbolic
from fxprec.passes import pipeline

STATISTIC = 1024  # elements: at width 0.25 no batch norm or loss has a larger statistic


def saved_for_backward(function, model: nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    """Tensors saved by one forward, one per storage; what is there anyway, parameters and buffers, left out."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*args)
    return [t for pointer, t in saved.items() if pointer not in known]


@cache
def resnet_saves(recipe: str, storage: str | None, low_ratio: float | None):
    torch.manual_seed(0)
    model, images = short_resnet(10, 0.25), torch.randn(16, 3, 32, 32)
    if recipe == "fp32":
        torch._dynamo.reset()
        return saved_for_backward(torch.compile(model, backend="aot_eager_decomp_partition"), model, images), None
    backend = eager_backend(recipe, storage=storage, low_ratio=low_ratio)
    tensors = saved_for_backward(compiled(model, backend), model, images)
    return tensors, backend.plans[0]


def num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def test_all_low_packed_keeps_no_large_tensor_in_float32():
    tensors, _ = resnet_saves("hfp8", "packed", 1.0)
    wide = [tuple(t.shape) for t in tensors if t.is_floating_point() and t.itemsize > 2 and t.numel() > STATISTIC]
    assert wide == []
    assert sum(t.numel() for t in tensors if t.dtype == torch.uint8) > 100_000


def test_all_low_packed_keeps_a_sixth_of_float32():
    ratio = num_bytes(resnet_saves("hfp8", "packed", 1.0)[0]) / num_bytes(resnet_saves("fp32", None, None)[0])
    assert 0.15 < ratio <= 0.17, "8 bits before each batch norm, and a bit of each ReLU's mask"


def test_native_fp8_keeps_at_most_0_19_of_float32_and_bf16_at_most_0_35():
    low, high = resnet_saves("fp8", "native", 1.0)[0], resnet_saves("bf16", "native", None)[0]
    in_float32 = num_bytes(resnet_saves("fp32", None, None)[0])
    assert 0.15 < num_bytes(low) / in_float32 <= 0.19
    assert 0.25 < num_bytes(high) / in_float32 <= 0.35, "batch norms between convolutions are recomputed"


@pytest.mark.parametrize("case", [("hfp8", "packed", 1.0), ("fp8", "native", 1.0), ("bf16", "native", None)])
def test_the_plan_predicts_the_bytes_within_5_percent(case):
    tensors, plan = resnet_saves(*case)
    assert plan.saved_bytes.planned == pytest.approx(num_bytes(tensors), rel=0.05)


class Branches(nn.Module):
    """One value (``h``) feeds two GEMMs and a residual add; a batch norm stands between GEMM and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bn(self.conv(x)).relu()
        return self.left(h) + self.right(h) + h


@cache
def branches():
    """Return the rewritten joint graph and the plan of `Branches`."""
    graphs = []

    class Keep:
        name = "keep"

        def apply(self, work):
            graphs.append(work.joint.graph)

    backend = eager_backend("hfp8", storage="packed", low_ratio=1.0)
    original = pipeline.PIPELINE
    run = pipeline.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "run", lambda work, *_: run(work, (*original, Keep())))
        compiled(Branches(), backend)(torch.randn(4, 3, 8, 8)).sum().backward()
    return graphs[0], backend.plans[0]


@cache
def inserted():
    """Return the joint graph of `Branches` with all of its casts, and their sites: no reader has been sent elsewhere."""
    ran = run_pass("insert-casts", Branches(), torch.randn(4, 3, 8, 8), recipe="hfp8", storage="packed")
    return ran.graph, ran.work.book.sites


def quantizes(graph):
    return graph.find_nodes(op="call_function", target=symbolic.QUANTIZE)


@pytest.mark.parametrize("all_casts", [False, True])
def test_a_value_with_several_readers_is_stored_once(all_casts):
    graph, sites = inserted() if all_casts else (branches()[0], branches()[1].sites)
    relu = next(s for s in sites if s.kind == "output" and "relu" in s.tensor)
    stores = [q for q in quantizes(graph) if q.args[2] == relu.id]
    assert len(stores) == all_casts, "in the end it is recomputed from the convolution's copy"
    forward = {s.id for s in sites if s.direction == "forward" and (all_casts or s.reads == "backward")}
    stored = [q.args[0] for q in quantizes(graph) if q.args[2] in forward]
    assert len(stored) == len(set(stored)) == len(forward)


def test_a_batch_norm_between_gemm_and_relu_has_no_site():
    _, plan = branches()
    outputs = [s.tensor for s in plan.sites if s.kind == "output"]
    assert sum("convolution" in name for name in outputs) == 3
    assert sum("relu" in name for name in outputs) == 1
    assert len(outputs) == 5, outputs  # the input, three GEMM results, the relu: neither batch norm nor adds


def test_what_backward_does_not_read_has_a_row_and_no_copy():
    """A convolution's result that only a sum reads, parameters, gradients: rows are the graph's, whatever is stored."""
    graph, plan = branches()
    copies = {q.args[2] for q in quantizes(graph)}
    assert copies == {s.id for s in plan.sites if s.reads == "backward"}
    unread = [s for s in plan.sites if s.id not in copies]
    assert {(s.reads, s.format) for s in unread} == {("all", plan.recipe.hi.name)}
    assert sorted({s.kind for s in unread}) == ["grad_output", "output", "param"]
    assert [(s.id, s.tensor, s.kind) for s in plan.sites] == [(s.id, s.tensor, s.kind) for s in inserted()[1]]


def test_gradients_have_sites_only_where_a_gemm_multiplies_them():
    graph, sites = inserted()
    gradients = {s.id: s.tensor for s in sites if s.direction == "backward"}
    assert sorted(gradients.values()) == ["convolution", "convolution_1", "convolution_2"]
    for q in quantizes(graph):
        if q.args[2] in gradients:
            (read,) = q.users
            (kept,) = read.users  # the model's own inf and NaN
            assert kept.target is symbolic.KEEP_NONFINITE
            assert {str(u.target) for u in kept.users} == {"aten.convolution_backward.default"}


def test_only_parameters_that_gemms_multiply_have_sites():
    _, plan = branches()
    assert sorted(s.tensor for s in plan.sites if s.kind == "param") == ["conv.weight", "left.weight", "right.weight"]
