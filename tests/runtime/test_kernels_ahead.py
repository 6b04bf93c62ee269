"""Kernels around GEMMs are compiled before the first step as that step launches them. On a GPU that is not there."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemm_helpers import half_graph, table_of
from generated.test_gpu_code import step, two_layers

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted functions have no machine code", allow_module_level=True)

from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from benchmarks.gpu.absent import lowered_halves, pretend
from fxprec.driver import kernels_ahead
from fxprec.ir.calls import call_of
from fxprec.kernels.coded_gemms import GemmKernel, kernel_called
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.runtime.gemm import hardware_casts, matmul, ops, totals, transpose, transpose_kernels, tuning
from fxprec.runtime.gemm.launch import Launch, noting
from fxprec.runtime.gemm.tiles import TILES

TABLE = table_of((0, "e4m3fn"), (5, "e5m2_sat"), (-4, "1-5-2"))
H100 = torch.device("cuda", 0)
KERNELS = (
    matmul.matmul_kernel,
    transpose_kernels.quantize_transpose_kernel,
    transpose_kernels.transpose_kernel,
    totals.shares_kernel,
    totals.totals_kernel,
    totals.gather_kernel,
)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let Triton compile for an H100, start nothing, and forget what was compiled."""
    pretend(monkeypatch, 90)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(hardware_casts, "_agrees", lambda fmt, device, keep: True)
    monkeypatch.setattr(matmul, "TILES", TILES[-2:])
    monkeypatch.setattr(sys.modules["triton.runtime.driver"].driver._active, "get_current_stream", lambda d: 0, False)
    yield monkeypatch
    for kernel in KERNELS:
        kernel.device_caches.clear()


def lowered() -> Graph:
    gm = half_graph(TABLE)
    lower(gm, "inductor", "cuda", WatchedRows(scaled=frozenset({1, 2}), watched=frozenset({0, 1, 2})))
    return gm.graph


class Compiled:
    """Counts what Triton compiles. An attempt that a race of parallel ``ast.parse`` ends, and that is repeated, is none."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kernels: list[str] = []
        compile_ = JITFunction._do_compile

        def counted(kernel: Any, *args: Any) -> Any:
            found = compile_(kernel, *args)
            self.kernels.append(kernel.__name__)
            return found

        patch.setattr(JITFunction, "_do_compile", counted)


def test_the_first_step_compiles_nothing_more(h100: pytest.MonkeyPatch) -> None:
    graph = lowered()
    compiled = Compiled(h100)
    assert kernels_ahead.failing_kernels(graph, H100) == {}
    ahead = len(compiled.kernels)
    assert {"matmul_kernel", "quantize_transpose_kernel", "gather_kernel"} <= set(compiled.kernels)

    started: list[str] = []
    h100.setattr(CompiledKernel, "run", property(lambda kernel: lambda *args: started.append(kernel.name)))
    h100.setattr(CompiledKernel, "launch_metadata", lambda *args: None)
    h100.setattr(CompiledKernel, "__getattr__", lambda kernel, name: None, False)
    h100.setattr(tuning, "known_tile", lambda key: TILES[-1])
    h100.setattr(Tensor, "data_ptr", lambda x: 4096 + x.storage_offset() * x.itemsize)
    with FakeTensorMode():
        for node in graph.nodes:
            if kernel_called(node) is not None:
                args = torch.fx.map_arg(node.args, lambda n: kernels_ahead._like(n, H100))
                ops._FUNCTIONS[type(call_of(node))](*args)
    assert len(started) > 3
    assert len(compiled.kernels) == ahead


def test_rows_of_the_table_are_compiled_once(h100: pytest.MonkeyPatch) -> None:
    """Each second row begins at a multiple of 16 bytes: half of them had code of their own."""
    compiled = Compiled(h100)
    kernels_ahead.failing_kernels(lowered(), H100)
    assert compiled.kernels.count("quantize_transpose_kernel") == 2, "one for each format"


def test_a_product_fails_where_all_of_its_tiles_do(h100: pytest.MonkeyPatch) -> None:
    graph = lowered()
    product = GemmKernel("gemm", ("e5m2_sat", "e4m3fn", "1-5-2"))

    def failing(deepest: int) -> Any:
        def why(launch: Launch) -> str | None:
            depth = dict(launch.options).get("DEPTH")
            return "no memory" if depth is not None and depth >= deepest else None

        return why

    assert {tile.depth for tile in TILES[-2:]} == {32, 64}
    h100.setattr(Launch, "why_not_compiled", failing(64))
    assert kernels_ahead.failing_kernels(graph, H100) == {}
    h100.setattr(Launch, "why_not_compiled", failing(32))
    assert kernels_ahead.failing_kernels(graph, H100) == {product: "no memory"}


def test_they_are_compiled_side_by_side_and_the_log_says_so(
    h100: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = threading.Barrier(2, timeout=20)  # of two that wait for each other, one after the other none would pass
    h100.setattr(os, "cpu_count", lambda: 2)
    asked = iter(range(100))
    h100.setattr(Launch, "why_not_compiled", lambda launch: None if next(asked) > 1 else (meeting.wait(), None)[1])
    with caplog.at_level("INFO", logger="fxprec"):
        kernels_ahead.failing_kernels(lowered(), H100)
    assert "variants of kernels around GEMMs for cuda:0" in caplog.text
    assert "compiled them in" in caplog.text


def test_what_the_compiler_says_is_handed_on(h100: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("at 12:3\nno such type")

    h100.setattr(JITFunction, "_do_compile", refuse)
    failing = kernels_ahead.failing_kernels(lowered(), H100)
    assert set(failing.values()) == {"it does not compile: ValueError: no such type"}


def test_an_unaligned_tensor_is_told_from_an_aligned_one() -> None:
    with FakeTensorMode(), noting() as found:
        codes = torch.empty(33, 32, dtype=torch.uint8, device=H100)
        transpose.transpose(codes.narrow(0, 0, 32))
        transpose.transpose(codes.view(-1).narrow(0, 1, 1024).view(32, 32))
        transpose.transpose(codes.narrow(0, 1, 32))
    first, second, third = (launch for (launch,) in found)
    assert first == third
    assert first != second


def test_what_fails_beside_others_is_compiled_once_more_alone(h100: pytest.MonkeyPatch) -> None:
    """Threads of Python 3.11 disturb each other's parser, and kernels were left out for it."""
    main = threading.current_thread()

    def why(launch: Launch) -> str | None:
        return None if threading.current_thread() is main else "SystemError: AST constructor recursion depth mismatch"

    h100.setattr(Launch, "why_not_compiled", why)
    assert kernels_ahead.failing_kernels(lowered(), H100) == {}


@pytest.mark.filterwarnings("ignore:storage=")
@pytest.mark.parametrize(
    ("arch", "wanted"),
    [(80, {"matmul_kernel"}), (90, {"quantize_transpose_kernel", "transpose_kernel", "gather_kernel"})],
    ids=["decoded on the way in", "torch._scaled_mm"],
)
def test_each_call_of_a_lowered_step_is_compiled_ahead(h100: pytest.MonkeyPatch, arch: int, wanted: set[str]) -> None:
    """A call of two kernels, as the totals are, needs both."""
    pretend(h100, arch)
    compiled: list[str] = []
    h100.setattr(Launch, "why_not_compiled", lambda launch: compiled.append(launch.kernel.__name__))
    halves = lowered_halves(h100, step(two_layers, (32, 16), recipe="fp8", gemms="low"), "inductor", arch)
    for gm in halves:
        assert kernels_ahead.failing_kernels(gm.graph, H100) == {}
    assert set(compiled) == wanted | {"shares_kernel", "totals_kernel"}
