"""What Dynamo gives up and runs as written is said: here methods that break a graph inside a loop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import one_rank
from models import TanhLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from fxprec.driver import uncompiled

OPTIONS: dict[str, Any] = {"recipe": "fp8", "low_ratio": 1.0, "lowering": "eager"}
WORDS = (
    r"forward \(.*test_uncompiled_frames.py:\d+\): runs uncompiled, in the model's own precision, with head, mixed\.0: "
    r".*loop.*\. Only functions and modules of yours that it calls are compiled, each by itself \(mixed\.1\); TORCH_LOGS"
)


class Net(nn.Module):
    """Blocks in a loop, and layers of torch's own; ``breaks`` stops Dynamo inside the loop."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.head = nn.Linear(8, 8)
        self.mixed = nn.ModuleList([nn.Linear(8, 8), TanhLayer()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for part in self.mixed:
            if self.breaks:
                torch._dynamo.graph_break()
            x = part(x)
        return x


def train_step(model: nn.Module) -> None:
    model(torch.randn(4, 8)).square().mean().backward()


@pytest.mark.filterwarnings("error::fxprec.FxprecWarning")
def test_what_does_not_run_at_all_is_not_told_to_run_uncompiled() -> None:
    model = torch.compile(Net(breaks=True), backend="fxprec", options=OPTIONS, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        train_step(model)
    assert not fxprec.backend_of(model).events


def test_a_method_that_runs_uncompiled_is_told_with_what_it_leaves_out() -> None:
    model = torch.compile(Net(breaks=True), backend="fxprec", options=OPTIONS)
    with pytest.warns(fxprec.FxprecWarning, match=WORDS) as caught:
        train_step(model)
    train_step(model)
    assert len(caught) == 1
    backend = fxprec.backend_of(model)
    assert [event.kind for event in backend.events if "runs uncompiled" in event.detail] == ["fallback"]
    assert [[gemm.module for gemm in plan.gemms] for plan in backend.plans] == [["linear"]], "the block alone"


def test_where_no_module_of_the_users_is_called_the_words_say_so() -> None:
    alone = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([TanhLayer() for _ in range(4)]))
    assert "each by itself (1.0, 1.1, 1.2 and 1 more); " in uncompiled._mend(alone)
    alone[1][0].forward = torch.compiler.disable(alone[1][0].forward)
    assert "each by itself (1.1, 1.2, 1.3); " in uncompiled._mend(alone)
    assert "each by itself (here no module); " in uncompiled._mend(alone[:1])
    assert "each by itself; " in uncompiled._mend(train_step)


def test_strict_makes_it_an_error() -> None:
    model = torch.compile(Net(breaks=True), backend="fxprec", options={**OPTIONS, "strict": True})
    for _ in range(2):
        with pytest.raises(fxprec.FallbackError, match=WORDS):
            train_step(model)


def test_a_backend_object_is_enough_in_a_process_that_asked_for_no_other_name() -> None:
    code = (
        "import fxprec, test_uncompiled_frames as t\n"
        "backend = fxprec.Backend(fxprec.Config.from_options(t.OPTIONS))\n"
        "t.train_step(t.torch.compile(t.Net(breaks=True), backend=backend))\n"
        "print([event.kind for event in backend.events if 'runs uncompiled' in event.detail])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "['fallback']"), done.stderr[-2000:]


class MadeInForward(nn.Module):
    """A module that forward makes, whose constructor Dynamo gives up before it has children."""

    def __init__(self) -> None:
        for _ in range(2):
            torch._dynamo.graph_break()
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Maker(nn.Module):
    """(batch, 8) to the same, through a module made at the first call, as BigBird makes its dense attention."""

    def __init__(self) -> None:
        super().__init__()
        self.made: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = MadeInForward()
        return self.made(x)


def test_a_constructor_that_dynamo_gives_up_is_no_loss() -> None:
    model = torch.compile(Maker(), backend="fxprec", options={**OPTIONS, "strict": True})
    train_step(model)
    train_step(model)
    assert [[gemm.module for gemm in plan.gemms] for plan in fxprec.backend_of(model).plans][-1:] == [["made.linear"]]


@pytest.fixture
def mesh() -> Iterator[Any]:
    with one_rank():
        yield init_device_mesh("cpu", (1,))


def test_fsdp_whose_hooks_break_the_loop_over_blocks_is_told(mesh: Any) -> None:
    net = Net(breaks=False)
    for module in (net.mixed[1], net):
        fully_shard(module, mesh=mesh)
    model = torch.compile(net, backend="fxprec", options=OPTIONS)
    with pytest.warns(fxprec.FxprecWarning, match=WORDS):
        train_step(model)
    assert [[gemm.module for gemm in plan.gemms] for plan in fxprec.backend_of(model).plans] == [["linear"]]


def test_other_backends_and_generators_are_not_told_of() -> None:
    train_step(torch.compile(Net(breaks=True), backend="aot_eager"))

    def numbers(x: Tensor) -> Iterator[Tensor]:
        yield x * 2

    def call(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return next(numbers(x))

    torch.compile(call, backend="fxprec", options=OPTIONS)(torch.ones(3))


def test_what_a_compilation_ended_in_is_part_of_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """After these errors of a backend Dynamo goes on without it, and logs what the error says."""

    def compile(self: fxprec.Backend, gm: object, inputs: object) -> None:
        raise DataDependentOutputException(torch.ops.aten.nonzero.default)

    monkeypatch.setattr(fxprec.Backend, "_compile", compile)
    words = r"runs uncompiled, .*: Backend compiler exception: aten\.nonzero\.default\. Only functions"
    with pytest.warns(fxprec.FxprecWarning, match=words):
        train_step(torch.compile(Net(breaks=False), backend="fxprec", options=OPTIONS))
    torch.compiler.reset()
    with pytest.raises(fxprec.FallbackError, match=words):
        train_step(torch.compile(Net(breaks=False), backend="fxprec", options=OPTIONS | {"strict": True}))


class Counted(TorchDispatchMode):
    """Counts operators, as `FlopCounterMode` does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strict", [False, True])
def test_a_first_step_inside_of_a_dispatch_mode_is_told_and_the_next_is_compiled(strict: bool) -> None:
    """Dynamo marked the code to be skipped: all later steps ran uncompiled, and nothing said so."""
    model = torch.compile(Net(breaks=False), backend="fxprec", options={**OPTIONS, "strict": strict})
    words = r"forward \(.*runs uncompiled in this call, .* torch dispatch mode, here Counted; calls outside of it"
    expected = (
        pytest.raises(fxprec.FallbackError, match=words) if strict else pytest.warns(fxprec.FxprecWarning, match=words)
    )
    with Counted() as counted, expected as told:
        train_step(model)
    assert strict or (counted.seen and len(told) == 1)
    assert not fxprec.backend_of(model).plans
    train_step(model)
    assert len(fxprec.backend_of(model).plans) == 1


class Yielding(Net):
    """A ``forward`` that is a generator."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        x = self.head(x)
        yield x
        yield self.mixed[0](x)


def test_a_forward_that_is_a_generator_is_told() -> None:
    model = torch.compile(Yielding(breaks=False), backend="fxprec", options=OPTIONS)
    with pytest.warns(fxprec.FxprecWarning, match=r"forward \(.* runs uncompiled, .* with head, mixed\.0: .*generator"):
        sum(y.square().mean() for y in model(torch.randn(4, 8))).backward()


class Checked(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] < 2:
            raise ValueError("one row is too few")
        return super().forward(x)


def test_an_exception_of_the_models_own_is_named() -> None:
    """Dynamo gives such a method up for good, so a call that raises nothing runs uncompiled too."""
    model = torch.compile(Checked(breaks=False), backend="fxprec", options=OPTIONS)
    words = r"runs uncompiled, .*: Observed exception ValueError\(.*'one row is too few'.*\)\. "
    with pytest.warns(fxprec.FxprecWarning, match=words), pytest.raises(ValueError, match="one row is too few"):
        model(torch.ones(1, 8))


@pytest.fixture
def suppressing() -> Iterator[None]:
    with torch._dynamo.config.patch(suppress_errors=True):
        yield


@pytest.mark.usefixtures("suppressing")
def test_suppressed_errors_of_fxprec_are_raised() -> None:
    """They ended in "'BudgetError' object has no attribute 'frame_exec_strategy'"."""
    model = torch.compile(Net(breaks=False), backend="fxprec", options={**OPTIONS, "peak_budget": 64})
    with pytest.raises(fxprec.BudgetError, match="peak_budget is 64 bytes"):
        train_step(model)


@pytest.mark.usefixtures("suppressing")
@pytest.mark.parametrize("strict", [False, True])
def test_what_runs_uncompiled_for_a_suppressed_error_is_told(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("fxprec.compat.compile_fx", fail)
    model = torch.compile(TanhLayer(), backend="fxprec", options={**OPTIONS, "strict": strict})
    words = r"forward \(.* runs uncompiled, in the model's own precision, with linear: no such kernel\."
    with (
        pytest.raises(fxprec.FallbackError, match=words) if strict else pytest.warns(fxprec.FxprecWarning, match=words)
    ):
        train_step(model)
