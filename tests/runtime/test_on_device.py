"""Launches, copies and groups belong to the tensors' device. Fake tensors on "cuda:1"; stubs of what a GPU would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fxprec
from fxprec.driver import backend, graph, option_checks
from fxprec.driver.interpreter import interpreted
from fxprec.errors import ConfigError
from fxprec.numerics.stats import parts_of
from fxprec.optim import SGD
from fxprec.runtime import losses, on_device, stats
from fxprec.runtime.optim import guards, running

SECOND = torch.device("cuda", 1)


class Current:
    """The current device, as `torch.cuda.device` sets it; the first GPU before."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.seen: list[torch.device] = []

    @contextmanager
    def of(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Stand for a Triton kernel: a launch notes the current device."""
        return lambda *args, **options: self.seen.append(self.device)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    found = Current()
    monkeypatch.setattr(torch.cuda, "device", found.of)
    return found


@pytest.fixture
def second() -> Iterator[Callable[..., Tensor]]:
    """Make fake tensors on the second GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield lambda *size, dtype=torch.float32: torch.empty(*size, dtype=dtype, device=SECOND)


def test_kernels_of_gemms_start_on_their_tensors_device(
    current: Current, second: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton refused the pointers, or ran unordered on the first GPU's stream."""
    pytest.importorskip("triton")
    from fxprec.numerics.formats import parse
    from fxprec.runtime.gemm import matmul, totals, transpose, transpose_kernels, tuning
    from fxprec.runtime.gemm.tiles import SMALL

    for module, name in (
        (transpose, "transpose_kernel"),
        (transpose_kernels, "quantize_transpose_kernel"),
        (totals, "shares_kernel"),
        (totals, "totals_kernel"),
        (totals, "gather_kernel"),
        (matmul, "matmul_kernel"),
    ):
        monkeypatch.setattr(module, name, current)
    monkeypatch.setattr(tuning, "known_tile", lambda key: SMALL)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: str(device))
    codes = second(32, 32, dtype=torch.uint8)
    operand = matmul.Operand(codes, parse("1-4-3+4"))
    transpose.transpose(codes)
    transpose.quantize_transpose(second(32, 32), second(11, dtype=torch.int32), parse("1-4-3+4"))
    totals.gathered(second(330, dtype=torch.int32))
    totals.totals(second(2, 16), second(16), second(1, 11), parts_of([0], [8], [8], [False], [False], [True]))
    matmul.matmul(operand, operand, tile=SMALL)
    matmul.matmul(operand, operand)
    assert current.seen == [SECOND] * 7


def test_other_kernels_start_on_their_tensors_device(
    current: Current, second: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from fxprec.runtime.aps import codec_triton
    from fxprec.runtime.arith import triton_kernel
    from fxprec.runtime.optim import triton_step

    monkeypatch.setattr(triton_kernel, "_matmul_kernel", current)
    monkeypatch.setattr(triton_kernel, "_flags", lambda spec: {})
    monkeypatch.setattr(codec_triton, "_encode_kernel", current)
    monkeypatch.setattr(codec_triton, "thresholds", lambda codec, device: None)
    monkeypatch.setattr(triton_step, "kernel", lambda rule: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton_step, "_table", lambda facts, device: None)
    triton_kernel.matmul(second(2, 3), second(3, 2), type("Spec", (), {"chunk": 0}))
    codec_triton.encode_values(second(5), None)
    monkeypatch.setattr(Tensor, "data_ptr", lambda self: 16)
    triton_step.run(None, [[second(5), second(5)]], second(1, 1), second(1, 1), None)
    assert current.seen == [SECOND] * 3


class Event:
    """Stands for `torch.cuda.Event`: without a stream it is recorded on that of the current device."""

    def __init__(self, current: Current) -> None:
        self.current = current

    def record(self, stream: torch.device | None = None) -> None:
        self.current.seen.append(self.current.device if stream is None else stream)


@pytest.mark.parametrize("takes", ["statistics", "losses"])
def test_events_wait_for_the_device_that_copies(
    takes: str, current: Current, second: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event on the idle first GPU was over at once, and pinned memory was read before anything was written."""
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(current))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    if takes == "statistics":
        stats.StatsQueue().push([0], second(10, dtype=torch.float64))
    else:
        losses.LossWatch().note(0, second(()))
    assert current.seen == [SECOND]


def test_a_group_on_two_devices_is_stepped_device_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel got the addresses of both, which ends the process."""
    weights = [torch.nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "meta", "cpu")]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    found: list[list[str]] = []
    monkeypatch.setattr(guards, "warn_if_stuck", lambda *args: None)
    monkeypatch.setattr(
        running, "_kernel", lambda rule, rows, *numbers: found.append([row[0].device.type for row in rows])
    )
    SGD(weights, lr=0.1).step()
    assert found == [["cpu", "cpu"], ["meta"]]


def test_a_cpu_has_no_current_device(current: Current) -> None:
    with on_device.current(torch.device("cpu")):
        assert current.device == torch.device("cuda", 0)


INSTEAD = (
    r"in the capture of a CUDA graph, whose scales would stay as they are.*; .* compile with mode='reduce-overhead'"
)


def test_a_capture_of_the_users_own_is_refused(second: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would have run again with one step's scales for ever, and pinned memory breaks some captures."""
    from fxprec.aps import APSReduceScatter, aps_hook
    from fxprec.driver.backend import capture
    from fxprec.driver.graph import PlannedGraph

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    taken = SimpleNamespace(device=SECOND)
    graph = PlannedGraph.__new__(PlannedGraph)
    graph.captured = taken
    with pytest.raises(ConfigError, match=f"^a model compiled with fxprec runs {INSTEAD}$"):
        graph(second(3))
    with pytest.raises(ConfigError, match=f"^a backward pass compiled with fxprec runs {INSTEAD}$"):
        stats.StatsQueue().push([0], second(10, dtype=torch.float64))
    monkeypatch.setattr(capture.Captured, "take", lambda gm, examples: taken)
    with pytest.raises(ConfigError, match=f"^fxprec compiles a model {INSTEAD}$"):
        fxprec.Backend()._compile(None, [second(3)])
    words = "in the capture of a CUDA graph, and each step has scales of its own; run the backward pass outside of torch.cuda"
    bucket = SimpleNamespace(buffer=lambda: second(3))
    with pytest.raises(ConfigError, match=f"^aps_hook runs {words}"):
        aps_hook(None, bucket)
    with pytest.raises(ConfigError, match=f"^use_aps's reduce-scatter runs {words}"):
        APSReduceScatter.__call__(None, second(3), second(3), None, None)


def test_inductors_captures_call_nothing_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor captures of mode="reduce-overhead" is the code it returned: here it captures whenever that runs."""
    capturing = [False]
    asked: list[bool] = []

    def refuse(device: torch.device, what: str, why: str) -> None:
        asked.append(capturing[0])

    def compiled(gm: torch.fx.GraphModule, examples: Any, **options: Any) -> Any:
        run = interpreted(gm)

        def captured(args: list[Any]) -> Any:
            capturing[0] = True
            try:
                return run(args)
            finally:
                capturing[0] = False

        return fxprec.compat.boxed(captured)

    monkeypatch.setattr(on_device, "refuse_capture", refuse)
    monkeypatch.setattr(graph, "refuse_capture", refuse)
    monkeypatch.setattr(backend, "refuse_capture", refuse)
    monkeypatch.setattr(fxprec.compat, "compile_fx_inner", compiled)
    monkeypatch.setattr(option_checks, "_WITHOUT_CUDA_GRAPHS", {})  # as on a GPU
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    config = fxprec.Config(recipe="hfp8", low_ratio=1.0, storage="packed", mode="reduce-overhead")
    run = torch.compile(model, backend=fxprec.Backend(config))
    for _ in range(2):
        run(torch.ones(4, 16)).sum().backward()
    assert len(asked) == 1 + 2 + 2, "compiling, two forwards, statistics of the forward half in each"
    assert not any(asked)
