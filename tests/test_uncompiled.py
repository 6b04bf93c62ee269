"""What Dynamo leaves to Python, and graphs with nothing to hold low: never without a word."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from backend_helpers import eager_backend
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Recurrent(nn.Module):
    """(batch, 5, 16) to (batch, 5, 4): a GEMM, an LSTM, a GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(16, 16), nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(x))[0])


class Interrupted(nn.Module):
    """(batch, 16) to (batch, 4): a GEMM, a piece without one, a GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = torch.tanh(x) * x
        torch._dynamo.graph_break()
        return self.last(x)


IN_PIECES = torch.torch_version.TorchVersion(torch.__version__) >= (
    2,
    15,
)  # around an LSTM; older torch skips all of it
WORDS = (
    r"forward \(.*test_uncompiled.py:\d+\): leaves lstm uncompiled, in the model's own precision: Dynamo does not "
    r"support RNN, GRU, or LSTM\. Set torch._dynamo.config.allow_rnn=True"
    if IN_PIECES
    else r"forward \(.*test_uncompiled.py:\d+\): runs uncompiled, in the model's own precision, with first, lstm, last: "
    r"Attempted to wrap RNN, GRU, or LSTM \(Set torch._dynamo.config.allow_rnn=True"
)


def test_a_recurrent_model_is_one_warning_with_the_module_and_the_way_out() -> None:
    backend = eager_backend("simulate", recipe="fp8")
    compiled = torch.compile(Recurrent(), backend=backend)
    with pytest.warns(fxprec.FxprecWarning, match=WORDS) as told:
        compiled(torch.randn(3, 5, 16)).sum().backward()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.randn(3, 5, 16)).sum().backward()
    assert [e.kind for e in backend.events if e.kind != "scale"] == ["fallback"]
    assert len(backend.plans) == (2 if IN_PIECES else 0)


def test_under_strict_it_is_an_error() -> None:
    compiled = torch.compile(Recurrent(), backend=eager_backend("simulate", recipe="fp8", strict=True))
    with pytest.raises(fxprec.FallbackError, match=WORDS):
        compiled(torch.randn(3, 5, 16))


def test_an_lstm_that_dynamo_is_let_to_trace_is_planned() -> None:
    backend = eager_backend("packed", recipe="fp8")
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(Recurrent(), backend=backend)(torch.randn(3, 5, 16)).sum().backward()
    assert len(backend.plans[0].gemms) > 2
    assert {e.kind for e in backend.events} <= {"scale", "unscaled"}


def test_each_piece_of_a_broken_graph_is_planned_and_the_breaks_are_events_without_a_warning() -> None:
    backend = eager_backend("packed", recipe="fp8", low_ratio=1.0)
    torch.compile(Interrupted(), backend=backend)(torch.randn(3, 16)).sum().backward()
    assert [len(plan.gemms) for plan in backend.plans] == [1, 0, 1]
    assert all(plan.sites for plan in backend.plans), "tanh's result is stored although there is no GEMM"
    told = [e for e in backend.events if e.kind == "uncompiled"]
    assert len(told) == 2
    assert all("split into several graphs, each planned separately" in e.detail for e in told)


class Broken(nn.Module):
    """(batch, 16) to the same: a GEMM and a break behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x


class Around(nn.Module):
    """(batch, 16) to (batch, 4): a GEMM, a part, a GEMM."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(16, 16), part, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x)))


class ByName(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(input=self.first(x)))


class WithAList(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(*[self.first(x)]))


class ItsMethod(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part.forward(self.first(x)))


class Checkpointed(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.part, self.first(x), use_reentrant=False))


class CheckpointedPartial(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(partial(self.part), self.first(x), use_reentrant=False))


def hooked(module: nn.Module) -> nn.Module:
    """Give a module the hook of backward at which Dynamo breaks the graph."""
    module.register_full_backward_hook(lambda *_: None)
    return module


HOOK = "Module-level backwards hooks require compiled autograd"
LEFT = {
    "part": (Around, lambda: hooked(nn.Linear(16, 16))),
    "part, by name": (ByName, lambda: hooked(nn.Linear(16, 16))),
    "part, with a list": (WithAList, lambda: hooked(nn.Linear(16, 16))),
    "part.0, part.1.0": (Around, lambda: hooked(nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16))))),
    "part.1": (ItsMethod, lambda: nn.Sequential(Broken(), nn.Linear(16, 16))),
    "the checkpointed part": (Checkpointed, Broken),
    "the checkpointed region": (CheckpointedPartial, Broken),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the keyword's tensor is no input to it
@pytest.mark.parametrize("case", LEFT)
def test_what_torchs_code_computes_at_a_break_is_told(case: str) -> None:
    kind, part = LEFT[case]
    names = re.escape(re.sub(", (by|with).*", "", case))
    words = (
        rf"forward \(.*test_uncompiled.py:\d+\): leaves {names} uncompiled, in the model's own precision: .*TORCH_LOGS"
    )
    model, x = kind(part()), torch.randn(3, 16)
    with pytest.warns(fxprec.FxprecWarning, match=words) as told:
        torch.compile(model, backend=eager_backend("packed", recipe="fp8"))(x).sum().backward()
    assert len([w for w in told if w.category is fxprec.FxprecWarning]) == 1
    with pytest.raises(fxprec.FallbackError, match=words):
        torch.compile(model, backend=eager_backend("packed", recipe="fp8", strict=True))(x)


def test_a_model_of_torchs_own_class_that_breaks_names_its_layers() -> None:
    model = nn.Sequential(hooked(nn.Linear(16, 16)), nn.Linear(16, 4))
    words = f"^Sequential: leaves 0, 1 uncompiled, in the model's own precision: {HOOK}"
    with pytest.warns(fxprec.FxprecWarning, match=words):
        torch.compile(model, backend=eager_backend("packed", recipe="fp8"))(torch.randn(3, 16, requires_grad=True))


def test_what_the_user_wrote_is_compiled_behind_a_break_and_what_was_excluded_is_not_told() -> None:
    excluded = nn.Linear(16, 16)
    excluded.forward = torch.compiler.disable(excluded.forward)  # type: ignore[method-assign]
    for part, plans in ((nn.Sequential(Broken()), 3), (excluded, 2)):
        backend = eager_backend("packed", recipe="fp8", strict=True)
        torch.compile(Around(part), backend=backend)(torch.randn(3, 16)).sum().backward()
        assert len(backend.plans) == plans


def test_a_graph_with_nothing_to_hold_low_says_so() -> None:
    backend = eager_backend("packed", recipe="fp8")
    table = torch.randn(8, 4, requires_grad=True)
    torch.compile(lambda t, i: t[i].sum(), backend=backend)(table, torch.arange(3)).backward()
    (told,) = backend.events
    assert (told.kind, told.detail) == (
        "unplanned",
        "nothing to hold low: the graph has no GEMM and saves nothing for backward",
    )


@pytest.mark.parametrize("options", [{}, {"peak_budget": "95%"}], ids=["plain", "budget"])
def test_a_compiled_step_that_calls_backward_traces_no_hook_of_fxprec(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = fxprec.optim.SGD(model.parameters(), lr=0.1)
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager", **options), optimizer=optimizer)

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    for _ in range(2):
        step(torch.randn(32, 16))
        optimizer.step()
        optimizer.zero_grad()
    cut = [event.site for event in backend.events if event.kind == "uncompiled"]
    assert any("test_uncompiled.py" in site for site in cut)
    assert not any(name in site for site in cut for name in ("backward.py", "updates.py", "budget.py", "autograd.py"))


@pytest.mark.parametrize("strict", [False, True])
def test_a_backward_that_is_part_of_the_graph_is_told(strict: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(4, 8)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    backend = eager_backend("native", recipe="fp8", strict=strict)
    step = torch.compile(lambda weights: torch.func.grad(loss)(weights), backend=backend)
    told = (
        r"torch\.func\.grad: its backward is in the same graph as its forward.* nothing that this backward reads is "
        r"narrowed"
    )
    if strict:
        with pytest.raises(fxprec.FxprecError, match=told):
            step(weights)
        return
    with pytest.warns(fxprec.FxprecWarning, match=told):
        found = step(weights)
    wanted = torch.func.grad(loss)(weights)
    for name in weights:
        assert (found[name] - wanted[name]).norm() < 2**-6 * wanted[name].norm()


class Undecided(nn.Module):
    """Leaves a loop by its data, which Dynamo cannot trace, and whose layers are torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.step(x)
            if x.sum() > 1e9:
                break
        return x


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_the_summary_says_that_nothing_is_compiled_and_why() -> None:
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager"))
    torch.compile(Undecided(), backend=backend)(torch.randn(4, 16)).sum().backward()
    assert re.match(
        r"fxprec fp8: nothing is compiled yet; forward \(.*test_uncompiled.py:\d+\): runs uncom", backend.summary()
    )


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_the_summary_names_what_a_break_leaves_uncompiled() -> None:
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager"))
    torch.compile(Around(hooked(nn.Linear(16, 16))), backend=backend)(torch.randn(3, 16)).sum().backward()
    words = r"saved for backward .*; forward \(.*test_uncompiled.py:\d+\) leaves part uncompiled$"
    assert re.search(words, backend.summary())
    backend.frames.left.update(dict.fromkeys(("first", "second"), ("runs uncompiled", "")))
    assert backend.summary().endswith(
        " leaves part uncompiled; first runs uncompiled; 1 more run or leave code uncompiled"
    )
