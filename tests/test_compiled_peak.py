"""What compiled graphs hold, replayed from Inductor's code, and a budget held to that."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processors import AT_HAND
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks.memory.measure import peak_bytes
from benchmarks.memory.pairs import loops_left_out
from fxprec.driver import joint_compilation
from fxprec.driver.attempts import ATTEMPTS, PeakAttempts
from fxprec.driver.compiled import CodePeak
from fxprec.driver.event_log import EventLog
from fxprec.driver.memory import CompiledPeak, PlainHalf
from fxprec.errors import BudgetError, FxprecWarning
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.replay.workspace import workspace
from fxprec.passes.budget_part import BudgetPart
from fxprec.plan import PeakBytes

aten = torch.ops.aten
FORWARD = """
class Runner:
    def call(self, args):
        weight, x = args
        args.clear()
        assert_size_stride(x, (4, 8), (8, 1), 'input')
        buf0 = empty_strided_cpu((4, 16), (16, 1), torch.float32)
        extern_kernels.mm(x, reinterpret_tensor(weight, (8, 16), (1, 8), 0), out=buf0)
        buf1 = empty_strided_cpu((4, 16), (16, 1), torch.bfloat16)
        cpp_fused_0(buf0, buf1)
        buf2 = buf0; del buf0  # reuse
        cpp_fused_1(buf2)
        buf3 = torch.ops.aten.max_pool2d_with_indices.default(reinterpret_tensor(buf2, (1, 4, 16), (64, 16, 1), 0), [2, 2])
        del buf2
        buf4 = buf3[0]
        buf5 = buf3[1]
        del buf3
        return (buf4, buf1, buf5, weight, )
"""
BACKWARD = """
def call(args):
    buf1, buf5, weight, tangents_1 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        stream0 = get_raw_stream(0)
        buf6 = empty_strided_cpu((4, 16), (16, 1), torch.float32)
        cpp_fused_2(tangents_1, buf5, buf6)
        del tangents_1
        del buf5
        buf7 = empty_strided_cpu((16, 8), (8, 1), torch.float32)
        extern_kernels.mm(reinterpret_tensor(buf6, (16, 4), (1, 16), 0), buf1, out=buf7)
        del buf1
        del buf6
    return (buf7, )
"""
WIDE, NARROW, POOLED, PLACES = 4 * 16 * 4, 4 * 16 * 2, 2 * 8 * 4, 2 * 8 * 8
X, WEIGHT = torch.empty(4, 8), torch.empty(16, 8)


def code(source: str) -> Any:
    return SimpleNamespace(source_code=source, constants=None)


def forward() -> PlainHalf:
    return PlainHalf(("weight", "x"), ("buf4", "buf1", "buf5", "weight"), (WEIGHT, X), is_backward=False)


def test_both_halves_are_replayed_buffer_by_buffer() -> None:
    peak = CompiledPeak(num_results=1)
    peak.saw(forward(), code(FORWARD))
    assert peak._forward == WIDE + NARROW + POOLED + PLACES, "a reused buffer counts once, inputs do not"
    backward = PlainHalf(("buf1", "buf5", "weight", "tangents_1"), (), (X, X, WEIGHT, torch.empty(1, 2, 8)), True)
    peak.saw(backward, code(BACKWARD))
    starts = POOLED + NARROW + PLACES + POOLED  # the caller's result, what was saved, the gradient of the result
    assert peak.bytes == max(starts + WIDE, POOLED + NARROW + WIDE + 16 * 8 * 4, peak._forward)
    assert not peak.unread


def allocated(run: Any) -> tuple[int, int]:
    """Return the most bytes that live while something runs, and the bytes of its results."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        results = run()
    found = results if isinstance(results, tuple) else (results,)
    return peak_bytes(profiled), sum(x.untyped_storage().nbytes() for x in found if isinstance(x, Tensor))


def _library_calls() -> list[Any]:
    def last(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    image, weight = last(torch.randn(8, 64, 8, 8).bfloat16()), last(torch.randn(128, 64, 3, 3).bfloat16())
    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    wide = [last(torch.randn(*shape).bfloat16()) for shape in ((8, 16, 64, 64), (8, 48, 64, 64), (16, 48, 3, 3))]
    query = torch.randn(2, 4, 256, 32)
    out, scale = aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, 0.0, True)
    x, gradient = torch.randn(2048, 256).bfloat16(), torch.randn(2048, 512).bfloat16()
    return [
        (aten.convolution.default, (image, weight, None, *window)),
        (aten.convolution_backward.default,
         (last(torch.randn(8, 128, 8, 8).bfloat16()), image, weight, None, *window, [True, True, False])),
        (aten.convolution_backward.default, (*wide, None, *window, [False, True, False])),
        (aten.convolution_backward.default, (*(x.float() for x in wide), None, *window, [False, True, False])),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (query, query, query, 0.0, True)),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
         (out, query, query, query, out, scale, 0.0, True)),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
         (torch.randn(2, 256, 4, 32).transpose(1, 2), query, query, query, out, scale, 0.0, True)),
        (aten.mm.default, (gradient.t(), x)),
        (aten.mm.default, (gradient, x[:512])),
        (aten.bmm.default, (gradient.view(512, 4, 512).transpose(0, 1), gradient.view(4, 512, 512))),
        (aten.bmm.default, (gradient.view(512, 4, 512).permute(1, 2, 0), gradient.view(4, 512, 512)[:, :, :128])),
        (aten.mm.default, (gradient[:8, :16], x[:16, :16])),
    ]  # fmt: skip


_CALLS = _library_calls()


@pytest.mark.parametrize(
    ("call", "threads"),
    [
        *((call, 1) for call in _CALLS),
        *((call, 2) for call in _CALLS if call[0] in (aten.mm.default, aten.bmm.default)),
    ],
    ids=lambda value: value[0].overloadpacket.__name__ if isinstance(value, tuple) else value,
)
def test_what_libraries_take_for_themselves_is_known(call: Any, threads: int, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    operator, args = call
    most, results = allocated(lambda: operator(*args))
    beside = workspace(operator._schema.name, [x for x in args if isinstance(x, Tensor)], threads)
    own = beside if torch.bfloat16 in AT_HAND.gemms or args[0].dtype != torch.bfloat16 else most - results
    assert 0.75 * (results + own) <= most <= 1.01 * (results + own)
    if operator in ops.ATTENTION | ops.ATTENTION_BACKWARD:
        assert most == results + own


def test_the_weight_of_a_convolutions_gradient_may_be_the_float32_parameter() -> None:
    """It tells the shape alone; the kernel's two copies of the weight's gradient have 16 bits."""
    gradient, x, weight = (
        torch.randn(*shape).bfloat16() for shape in ((8, 16, 64, 64), (8, 48, 64, 64), (16, 48, 3, 3))
    )
    both = [workspace("aten::convolution_backward", (gradient, x, shown), 1) for shown in (weight, weight.float())]
    assert both[0] == both[1] > 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def call(args):\n    for i in args:\n        pass\n", "for i in args"),
        (
            "def call(args):\n    x, y = args\n    z = unheard_of(x)\n    return (z,)\n",
            "unheard_of.x.: name 'unheard_of'",
        ),
        ("void call(int* args) {}", "not Python"),
        ("", "no function 'call'"),
    ],
)
def test_code_that_is_not_understood_is_said(source: str, words: str) -> None:
    peak = CompiledPeak(num_results=1)
    peak.saw(forward(), code(source))
    assert peak.bytes is None
    assert words.replace(".x.", "(x)") in peak.unread


def budget(planned: int, of: int = 1000) -> PeakBytes:
    return PeakBytes(budget=of, high=2000, planned=planned, waiting=500)


def test_a_plan_above_the_budget_is_made_again_with_what_it_holds_beyond_its_prediction() -> None:
    log = EventLog("graph 0", strict=False)
    peak = PeakAttempts(log)
    assert peak.hold(budget(990), 1090, 0) is None
    assert peak.part.beyond == 100
    assert [event.kind for event in log.events] == ["replanned"]
    assert "a plan that predicts 990 bytes at the peak holds 1.06 KiB (1090 bytes) as compiled" in log.events[0].detail
    assert peak.hold(budget(995), 998, 0).compiled == 998
    assert peak.tried == [(990, 1090), (995, 998)]


def test_a_budget_that_no_plan_keeps_is_an_error_that_names_the_best() -> None:
    peak = PeakAttempts(EventLog("graph 0", strict=False))
    for extra in range(ATTEMPTS - 1, 0, -1):
        assert peak.hold(budget(990), 1000 + extra, 0) is None
    with pytest.raises(BudgetError, match=r"the best of 5 plans holds 1001 bytes as compiled; raise it to"):
        peak.hold(budget(990), 1100, 0)


def test_what_waits_while_other_graphs_run_is_held_to_its_part() -> None:
    peak = PeakAttempts(EventLog("graph 0", strict=False))
    peak.set_part(BudgetPart(budget=1000, beside=200, waiting=450, num_graphs=2))
    assert peak.hold(replace(budget(700), beside=200), 790, 530) is None
    assert (peak.part.beyond, peak.part.beyond_waiting) == (0, 30)
    assert peak.hold(replace(budget(700), beside=200), 810, 450) is None
    assert (peak.part.beyond, peak.part.beyond_waiting) == (110, 30)
    assert peak.hold(replace(budget(790), beside=200), 800, 450).waiting == 450


def test_a_given_plan_above_its_budget_is_told_once() -> None:
    peak = PeakAttempts(EventLog("graph 0", strict=False))
    with pytest.warns(FxprecWarning, match="peak_budget 1000 bytes: the step holds 1.07 KiB"):
        assert peak.tell(budget(990), 1100, 3).compiled == 1100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peak.tell(budget(990), 1100, 4)
        peak.tell(budget(990), 900, 5)


def test_a_step_that_holds_more_as_compiled_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def replayed(num_results: int, device: str, threads: int) -> Any:
        made.append(num_results)
        return SimpleNamespace(of_code=lambda: CodePeak(0, 0, (), ""))

    def judged(self: PeakAttempts, plan: fxprec.Plan, found: CodePeak, **rest: Any) -> fxprec.Plan | None:
        peak = plan.peak_bytes
        assert peak is not None
        size = peak.budget + 4000 if len(made) == 1 else peak.planned
        return judge(self, plan, replace(found, bytes=size), **rest)

    judge = PeakAttempts.judged
    monkeypatch.setattr(joint_compilation, "CompiledPeak", replayed)
    monkeypatch.setattr(PeakAttempts, "judged", judged)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(256, 32)
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", peak_budget="100%", lowering="eager"))
    torch.compile(model, backend=backend)(x).sum().backward()
    assert [event.kind for event in backend.events].count("replanned") == 1
    peak = backend.plans[0].peak_bytes
    assert peak is not None
    assert len(made) == 2
    assert peak.compiled == peak.planned <= peak.budget, "what the first held beyond its prediction counts from then on"


@pytest.mark.inductor
@pytest.mark.parametrize(("share", "is_input_read"), [("100%", False), ("86%", True)])
def test_what_waits_of_images_and_of_a_pooling_is_predicted(
    share: str, is_input_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the input, unless backward computes from the input again; of a maximum's place an offset in 8 bits."""
    seen: list[tuple[int | None, int]] = []
    held = PeakAttempts.hold

    def hold(self: PeakAttempts, planned: PeakBytes, peak: int, waiting: int) -> PeakBytes:
        seen.append((planned.waiting, waiting))
        return held(self, planned, peak, waiting)

    monkeypatch.setattr(PeakAttempts, "hold", hold)
    torch.manual_seed(0)
    first, second = (nn.Conv2d(a, 16, 3, padding=1, bias=False) for a in (8, 16))
    model = nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), second, nn.BatchNorm2d(16), nn.ReLU())
    backend, images = fxprec.Backend(fxprec.Config(recipe="fp8", peak_budget=share)), torch.randn(8, 8, 32, 32)
    with loops_left_out():
        torch.compile(model, backend=backend)(images)  # compiles both halves
    (planned, compiled), *_ = seen
    assert planned is not None
    assert abs(planned - compiled) < images.numel() // 16, "neither a copy of the images nor 64 bits a place"
    repeated = [site for site in backend.plans[0].sites if site.way == "recompute"]
    assert bool(repeated) == is_input_read


def test_a_budget_of_more_than_the_machine_has_is_told() -> None:
    model, backend = (
        nn.Linear(4, 4),
        fxprec.Backend(fxprec.Config(recipe="fp8", peak_budget="9000TiB", lowering="eager")),
    )
    with pytest.warns(
        FxprecWarning, match=r"^peak_budget 9216000.00 GiB .*: cpu has .* GiB .*; give it less than that, or"
    ):
        torch.compile(model, backend=backend)(torch.randn(3, 4)).sum().backward()
    assert len([event for event in backend.events if event.kind == "fallback"]) == 1


IN_PARTS = """
def partition_0(args):
    weight, x = args
    args.clear()
    buf0 = empty_strided_cpu((4, 16), (16, 1), torch.float32)
    extern_kernels.mm(x, reinterpret_tensor(weight, (8, 16), (1, 8), 0), out=buf0)
    return (buf0, weight, )

def partition_1(args):
    buf0, = args
    args.clear()
    buf1 = empty_strided_cpu((4, 16), (16, 1), torch.bfloat16)
    cpp_fused_0(buf0, buf1)
    buf2 = empty_strided_cpu((4, 16), (16, 1), torch.bfloat16)
    cpp_fused_1(buf1, buf2)
    return (buf2, buf0, )

class Runner:
    def call(self, args):
        weight, x = args
        args.clear()
        partition0_args = [weight, x]
        del weight
        (buf0, weight) = self.partitions[0](partition0_args)
        del partition0_args
        partition1_args = [buf0]
        del buf0
        (buf2, buf0) = self.partitions[1](partition1_args)
        del partition1_args
        buf3 = empty_strided_cpu((4, 16), (16, 1), torch.float32)
        del buf0
        return (buf2, weight, )

runner = Runner(partitions=[partition_0, partition_1])
"""


def test_parts_that_become_cuda_graphs_are_replayed_in_their_place() -> None:
    """``mode="reduce-overhead"`` was not compared with its budget at all."""
    peak = CompiledPeak(num_results=1)
    peak.saw(PlainHalf(("weight", "x"), ("buf2", "weight"), (WEIGHT, X), is_backward=False), code(IN_PARTS))
    assert not peak.unread
    assert peak._forward == WIDE + NARROW + WIDE, "what a part made for itself is gone when it returns"
    assert peak.waiting == NARROW
