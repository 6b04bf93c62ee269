"""Attention's kernel on a GPU: traced on the CPU by torch's own rule of a GPU's choice; nothing runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not installed

import benchmarks.gpu.absent
from benchmarks.gpu.absent import CUDA, plan_for
from fxprec import Backend, Config, FxprecWarning, Plan
from fxprec.config import Settings
from fxprec.driver.compilation import Compilation
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import factors_of
from fxprec.passes.narrow_attention import narrow_attention


class Attention(nn.Module):
    """(batch, tokens, 4 * size) to (batch, 4, tokens, size)."""

    def __init__(
        self, size: int = 16, call: Callable[..., Tensor] = F.scaled_dot_product_attention, **given: Any
    ) -> None:
        super().__init__()
        self.qkv, self.size, self.call, self.given = nn.Linear(4 * size, 12 * size), size, call, given

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, self.size).permute(2, 0, 3, 1, 4).unbind()
        return self.call(q, k, v, **self.given)


class Traced(Exception):
    """Ends a compilation once the joint graph is there: no kernel of it runs on a CPU."""


@dataclass
class Found:
    """What one compilation got to."""

    graph: torch.fx.Graph
    plan: Plan | None = None

    @property
    def attention(self) -> list[tuple[str, torch.dtype, torch.dtype]]:
        """Each attention operator, forward's first: name, dtype of the query, dtype of the first result."""
        nodes = [n for n in self.graph.nodes if n.target in ops.ATTENTION | ops.ATTENTION_BACKWARD]
        return [
            (str(n.target).split(".")[1], factors_of(n)[-3].meta["val"].dtype, n.meta["val"][0].dtype) for n in nodes
        ]


def planned(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    arch: int = 89,
    autocast: bool = False,
    stop_at: str = "_partition",
    **options: Any,
) -> Found:
    """Return the joint graph that reaches a hook of `Compilation`, by default behind all passes, and its plan."""
    found: list[Found] = []

    def stop(self: Compilation, graph: Any, *args: Any, **options: Any) -> None:
        plan = None if self.traced is None else self.traced.compiled.plan
        found.append(Found(getattr(graph, "graph", graph), plan))
        raise Traced

    size = next(m.size for m in model.modules() if isinstance(m, Attention))
    torch.compiler.reset()
    with monkeypatch.context() as patch:
        plan_for(patch, arch, traces_only=True)
        patch.setattr(Compilation, stop_at, stop)
        compiled = torch.compile(model, backend=Backend(Config(**options)))
        with pytest.raises(Exception, match="Traced"), torch.autocast("cpu", torch.float16, enabled=autocast):
            compiled(torch.empty(2, 32, 4 * size))
    return found[0]


def traced(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, **options: Any
) -> list[tuple[str, torch.dtype, torch.dtype]]:
    """Return attention as torch chose it, before fxprec's passes."""
    return planned(monkeypatch, model, stop_at="_run_passes", **options).attention


FLASH, BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
EFFICIENT, CUDNN = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_float32_model_reaches_flash_both_ways(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """torch chooses before fxprec's passes run, and by float32 it chose a kernel of half the speed."""
    model = Attention(is_causal=True)
    assert traced(monkeypatch, model, recipe=recipe) == [(FLASH, BF16, BF16), (BACKWARD, BF16, BF16)]


def test_a_gpu_that_prefers_cudnn_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name, *_ in traced(monkeypatch, Attention(), arch=90)] == [CUDNN, f"{CUDNN}_backward"]


def test_on_a_cpu_and_where_numbers_are_simulated_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.gpu.absent, "CUDA", torch.device("cpu"))
    wide = [(EFFICIENT, FP32, FP32), (f"{EFFICIENT}_backward", FP32, FP32)]
    assert traced(monkeypatch, Attention()) == wide, "what a GPU would take without the rewrite"
    monkeypatch.undo()
    assert traced(monkeypatch, Attention(), recipe="fp8", storage="simulate") == wide


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :2], value=v[:, :2], enable_gqa=True)


def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v), k, v)


@pytest.mark.parametrize(("call", "count"), [(grouped, 1), (again, 1), (twice, 2)])
def test_grouped_queries_checkpointed_regions_and_chains(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Tensor], count: int
) -> None:
    found = traced(monkeypatch, Attention(call=call))
    forward = found[: len(found) - count]
    assert set(forward) == {(FLASH, BF16, BF16)}
    assert found[-count:] == [(BACKWARD, BF16, BF16)] * count


def test_a_head_that_16_bit_kernels_do_not_read_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 20 fits a float32 kernel; in 16 bits torch would take the T x T scores for a mask, or pad for flash."""
    assert traced(monkeypatch, Attention(20)) == [(FLASH, BF16, BF16), (BACKWARD, BF16, BF16)]
    masked = Attention(20, attn_mask=torch.zeros(32, 32))
    assert traced(monkeypatch, masked)[0] == (EFFICIENT, BF16, BF16)
    assert traced(monkeypatch, masked, arch=90)[0][0] == CUDNN


def from_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float())


def test_autocast_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to bfloat16 first, numbers lost 3 bits that autocast to float16 keeps."""
    found = planned(monkeypatch, Attention(call=from_float32), autocast=True, stop_at="_run_passes")
    assert found.attention[0] == (FLASH, FP16, FP16)
    assert not any(n.meta["val"].dtype == BF16 for n in found.graph.nodes if isinstance(n.meta.get("val"), Tensor))


@pytest.mark.filterwarnings("ignore:grad_scaling")
def test_float16_without_a_loss_scale_stays_float32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        r"^attention: it stays in float32, .*would underflow in float16.*hi is bf16, or give grad_scaling='dynamic'$"
    )
    for call in (F.scaled_dot_product_attention, again):
        with pytest.warns(FxprecWarning, match=words):
            assert traced(monkeypatch, Attention(call=call), recipe="fp16")[-1] == (f"{EFFICIENT}_backward", FP32, FP32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxprecWarning)
        assert traced(monkeypatch, Attention(), recipe="fp16", grad_scaling="dynamic")[-1] == (BACKWARD, FP16, FP16)
        assert traced(monkeypatch, Attention().requires_grad_(False), recipe="fp16")[0] == (FLASH, FP16, FP16)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_the_plan_is_that_of_float32_tensors(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Each operand's 16-bit copy was a tensor to store, and the result's codes lay as heads, which no GEMM multiplies."""
    model = nn.Sequential(Attention(is_causal=True), nn.Flatten(2), nn.Linear(512, 64))
    found = planned(monkeypatch, model, recipe=recipe)
    assert found.attention == [(FLASH, BF16, BF16), (BACKWARD, BF16, BF16)], "narrow once more, by narrow-gemms"
    with monkeypatch.context() as patch:
        patch.setattr(benchmarks.gpu.absent, "CUDA", torch.device("cpu"))
        as_captured = planned(patch, model, recipe=recipe)
    assert as_captured.attention[0][0] == EFFICIENT
    assert found.plan is not None
    assert as_captured.plan is not None
    assert [(s.format, s.way, s.shape) for s in found.plan.sites] == [
        (s.format, s.way, s.shape) for s in as_captured.plan.sites
    ]


def test_the_step_that_measures_runs_attention_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(monkeypatch, Attention(), recipe="fp8", policy="exact")
    assert found.plan is None, "not solved yet"
    assert found.attention == [(FLASH, BF16, BF16), (BACKWARD, BF16, BF16)]


def rewritten(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return the result of a function whose attention is rewritten for a GPU; it runs on the CPU all the same."""
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, examples: Any) -> Any:
        settings = Settings.of(Config())
        assert narrow_attention(gm, CUDA, settings, is_training=False) is None
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    found = torch.compile(function, backend=backend)(*inputs)
    assert len(graphs) == 1
    return found


@pytest.mark.parametrize("size", [16, 20])
def test_numbers_are_those_of_16_bit_operands(size: int) -> None:
    q, k, v = torch.randn(3, 2, 4, 32, size)
    mask = torch.zeros(32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), torch.finfo(FP32).min)
    mask[0] = torch.finfo(FP32).min  # a row that masks all, as padding does, has a mean and no NaN
    narrow = [x.bfloat16() for x in (q, k, v)]
    for given in ({"attn_mask": mask}, {"attn_mask": mask == 0}, {"is_causal": True}, {"scale": 0.5}):
        found = rewritten(lambda *x, given=given: F.scaled_dot_product_attention(*x, **given), q, k, v)
        if given.get("attn_mask") is mask:
            given = {"attn_mask": mask.clamp(min=torch.finfo(BF16).min).bfloat16()}
        expected = F.scaled_dot_product_attention(*narrow, **given).float()
        assert found.dtype == FP32
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9, equal_nan=True)
        assert "attn_mask" not in given or given["attn_mask"].dtype == torch.bool or not found.isnan().any()
