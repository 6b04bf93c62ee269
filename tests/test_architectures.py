"""benchmarks/architectures: a few of its own kinds, trained in the nearly exact format with a promotion in between."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not installed

from models import Apply

from benchmarks.architectures import mixed
from benchmarks.architectures.__main__ import renewed, run, summary
from benchmarks.architectures.own import OWN, Own
from benchmarks.architectures.registry import architectures
from benchmarks.architectures.training import PLAIN, Row

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["graph_convolution", "rnn", "dlrm_sparse", "mixer", "routed_experts"])
def test_it_trains_as_float32_does(name: str) -> None:
    (row,) = run(name, OWN[name], ["near"], "eager")
    assert row.error is None
    assert max(row.gradient_errors) < 1e-5
    assert row.promoted > 0


def dropped() -> nn.Module:
    """(4, 8, 32) to the same: attention and a layer, each with dropout, whose probabilities are 0."""
    return nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), nn.Linear(32, 32))


@pytest.mark.parametrize("side", list(mixed.SIDES))
def test_under_autocast_with_dropout_it_trains_as_autocast_does(side: str) -> None:
    assert mixed.turn_dropout_on(dropped()) == 4, "of attention, and three modules"
    rows = mixed.measure("dropped", Own("none", dropped, lambda: (torch.randn(4, 8, 32),)), [side])
    assert [(row.side, row.error) for row in rows] == [("autocast", None), (side, None)][side == "near" :]


class ByHand(nn.Module):
    """(2, 24, 64) to (2, 4, 24, 16): attention whose masked softmax torch fuses where no gradient is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 24, 4, 16).transpose(1, 2) for layer in self.make)
        shares = torch.softmax(q @ k.transpose(-1, -2) / 4.0 + torch.zeros(2, 1, 1, 24), -1)
        return nn.functional.dropout(shares, mixed.DROPOUT, self.training) @ v


def test_attention_that_torch_fuses_in_evaluation_has_autocasts_loss() -> None:
    counters.clear()
    (row,) = mixed.measure("by hand", Own("none", ByHand, lambda: (torch.randn(2, 24, 64),)), ["near"])
    assert (row.error, counters["inductor"]["fuse_attention"]) == (None, 2), "the reference's evaluation and the row's"


def test_where_all_is_computed_again_none_is_promoted() -> None:
    (row,) = run("splines", OWN["splines"], ["near"], "eager")
    assert (row.error, row.promoted) == (None, 0)
    assert row.computed_again > 0


def test_where_nothing_is_promoted_it_fails() -> None:
    """Backward reads no value of a table's rows."""

    def embedded() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 8), Apply(torch.sum))

    (row,) = run("embedded", Own("none", embedded, lambda: (torch.arange(4),)), ["near"], "eager")
    assert row.error == "no tensor is held low, so that none was promoted"


def test_what_a_library_raises_is_a_row() -> None:
    class Broken:
        family = "none"

        def build(self) -> None:
            raise ValueError("no such class\nand more")

    rows = run("broken", Broken(), ["near", "fp8"], "eager")
    assert [(row.side, row.error) for row in rows] == [("float32", "ValueError: no such class")]
    found = summary(rows, {"broken": Broken()})
    assert found["not compiled by aot_eager"] == {"broken": "ValueError: no such class"}
    assert (found["passed"], found["failed"]) == (0, [])


def test_a_side_that_runs_again_replaces_its_own_failure_alone() -> None:
    """Every side of an architecture was dropped, where one had failed."""
    near, again = Row("a", "near", "eager"), Row("a", "fp8", "eager")
    other = Row("b", "fp8", "eager", error="off")
    rows = [near, Row("a", "autocast", "eager"), Row("a", "fp8", "eager", error="off"), other]
    bf16 = Row("a", "bf16", "eager", error="off")
    found = [Row("a", "autocast", "eager", error="another"), again]
    assert renewed([*rows, bf16], found, ["fp8"]) == [near, rows[1], other, bf16, again]
    assert renewed([Row("a", PLAIN, "eager", error="off"), other], [again], ["fp8"]) == [other, again]


def test_there_are_more_than_120() -> None:
    pytest.importorskip("transformers")
    assert len(architectures()) > 120
