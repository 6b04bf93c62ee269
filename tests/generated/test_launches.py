"""A generated kernel that compiles and cannot start is an error of ours that names it; torch's own errors stay."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from fxprec import LoweringError, compat
from fxprec.config import Config
from fxprec.driver.lowering import Lowering
from fxprec.driver.wrappers import named_launches

NAMES = ("fxprec_flat_relu_1", "store_mxfp6")


def too_much() -> Exception:
    return OutOfResources(300_000, 232_448, "shared memory")


class Launcher:
    """Stands for Triton's and Inductor's launchers: ``fn`` is the kernel."""

    def __init__(self, name: str, error: Exception) -> None:
        def fn() -> None: ...

        fn.__name__ = name
        self.fn, self.error = fn, error

    def run(self, args: list[Any]) -> Any:
        raise self.error


ERRORS = [too_much(), RuntimeError(f"No valid triton configs. OutOfResources: {too_much()}")]


@pytest.mark.parametrize("error", ERRORS, ids=["Triton", "Inductor"])
def test_the_kernel_is_named_with_cause_and_way_out(error: Exception) -> None:
    run = named_launches(Launcher(NAMES[0], error).run, NAMES, "graph 0's forward half")
    words = (
        r"^the generated kernel fxprec_flat_relu_1 of graph 0's forward half compiles but cannot be launched: out of "
        r"resource: shared memory, Required: 300000, Hardware limit: 232448.* compile with options=\{'lowering': 'induc"
    )
    with pytest.raises(LoweringError, match=words) as caught:
        run([])
    assert caught.value.__cause__ is error


def test_where_no_launcher_is_seen_the_kernels_are_listed() -> None:
    def run(args: list[Any]) -> Any:
        raise too_much()

    with pytest.raises(LoweringError, match=r"kernel fxprec_flat_relu_1, store_mxfp6 or another of g's backward half"):
        named_launches(run, NAMES, "g's backward half")([])


@pytest.mark.parametrize(
    ("name", "error"), [("triton_poi_fused_0", too_much()), (NAMES[0], RuntimeError("CUDA error: illegal address"))]
)
def test_other_errors_stay_as_they_are(name: str, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        named_launches(Launcher(name, error).run, NAMES, "g's forward half")([])
    assert caught.value is error


def test_halves_without_generated_kernels_are_called_as_they_are() -> None:
    run = Launcher("any", too_much()).run
    assert named_launches(run, (), "g's forward half") == run


def test_a_kernel_that_cannot_start_as_it_is_loaded_is_left_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor loads kernels while it builds, some of them: all generated ones were left out."""
    from generated.kernel_helpers import lower_half, two_casts

    monkeypatch.setattr(compat, "no_triton", lambda device: None)
    told: list[Any] = []
    lowering = Lowering(Config(lowering="triton", recipe="hfp8"), torch.device("cpu"), told.append)
    builds: list[int] = []
    first: list[str] = []

    def lowered(gm: torch.fx.GraphModule, name: str, without: frozenset[str]) -> Any:
        found = lower_half(gm, name, without)
        first[:] = first or found.kernel_names
        return found

    def build(gm: torch.fx.GraphModule) -> Any:
        builds.append(sum(n.target is compat.TritonCalls.target for n in gm.graph.nodes))
        if len(builds) == 1:
            Launcher(first[0], too_much()).run([])
        return lambda args: None

    lowering.compile(two_casts(), lowered, build)
    assert builds == [2, 1]
    assert [n.detail.split(": ")[0] for n in told] == ["it compiles but cannot be launched"]
    assert lowering.without == {first[0]}


SCALED = """
import triton
import triton.language as tl

@triton.jit
def scaled(in0, out0, n):
    i = tl.arange(0, 16)
    tl.store(out0 + i, tl.load(in0 + i, mask=i < n), mask=i < n)
"""


def test_nodes_with_one_value_stay_different_arguments() -> None:
    """A cast in storage simulate has the value of its input. Torch 2.11 then gave the kernel its own empty output."""
    from torch._inductor.fx_passes.post_grad import decompose_triton_kernel_wrapper_functional
    from torch._subclasses import FakeTensorMode

    from fxprec.passes.lowering.triton.launch import insert_launch

    graph, mode = Graph(), FakeTensorMode()
    with mode:
        shared = torch.empty(16)
    x = graph.placeholder("x")
    empty = graph.call_function(torch.ops.aten.empty_strided.default, ([16], [1]))
    x.meta["val"] = empty.meta["val"] = shared
    arguments: dict[str, object] = {"in0": x, "out0": empty, "n": 16}
    call = insert_launch(graph, compat.TritonCalls(), SCALED, "scaled", 1, arguments, ["out0"])
    _, seen = call.meta["eager_input_vals"]
    assert seen["kwargs"]["in0"] is not seen["kwargs"]["out0"]

    graph.output((graph.call_function(operator.getitem, (call, "out0")),))
    gm = GraphModule(torch.nn.Module(), graph)
    empty.meta["val"] = shared.detach()  # Inductor propagates new values before it traces the launch
    with V.set_fake_mode(mode):
        decompose_triton_kernel_wrapper_functional(gm.graph)
    (launch,) = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.triton_kernel_wrapper_mutation)
    given: Any = launch.kwargs["kwargs"]
    assert given["in0"] is x
