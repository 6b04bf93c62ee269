"""What Dynamo leaves to Python, and graphs with nothing to hold low: never without a word."""

from __future__ import annotations

import warnings

import pytest
import torch
from backend_helpers import eager_backend
from torch import Tensor, nn

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
    r"forward \(.*test_uncompiled.py:\d+\): leaves lstm uncompiled, in its own precision: Dynamo does not support RNN, GRU, "
    r"or LSTM\. Set torch._dynamo.config.allow_rnn=True"
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
    assert all("cut in several graphs, each planned for itself" in e.detail for e in told)


def test_a_graph_with_nothing_to_hold_low_says_so() -> None:
    backend = eager_backend("packed", recipe="fp8")
    table = torch.randn(8, 4, requires_grad=True)
    torch.compile(lambda t, i: t[i].sum(), backend=backend)(table, torch.arange(3)).backward()
    (told,) = backend.events
    assert (told.kind, told.detail) == (
        "unplanned",
        "nothing to hold low: no GEMM, and nothing of it is stored for backward",
    )
