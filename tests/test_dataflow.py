"""``grouping="dataflow"`` from `Config` to the report: training, evaluation, plan files, dumps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backend_helpers import Cnn, assert_close, compare, eager_backend
from command_line import exit_code
from torch import Tensor, nn

import fxprec
from fxprec import Plan, PlanError
from fxprec.plan.explain import explain
from fxprec.report.load import plans_of


class Residual(nn.Module):
    """(batch, 8), (batch, 8) to a loss: two blocks around one residual stream, a target that training alone reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(24, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        out = self.head(x)
        return out if target is None else (out - target).square().mean()


BORDERS = [(0, 1), (1, 0), (0, 2), (2, 0), (0, 3)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[fxprec.Backend, Path]:
    """A backend that trained and evaluated `Residual`, and its plan file."""
    backend = eager_backend("packed", grouping="dataflow", low_ratio=0.3)
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    compiled, reference = compare(Residual, [(x, target)], backend)
    with torch.no_grad():
        assert_close(compiled(x), reference(x), "evaluation")
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    backend.plans[0].save(path)
    return backend, path


def test_the_residual_stream_is_one_group(trained) -> None:
    (plan,) = trained[0].plans
    assert [(g.group_before, g.group_after) for g in plan.gemms] == BORDERS
    assert plan.grouping == "dataflow"
    assert plan.groups[0].elements == max(g.elements for g in plan.groups)
    assert plan.low_groups == {0}, "policy size begins with it"
    assert sum(g.elements for g in plan.groups) == plan.total_elements


def test_evaluation_groups_as_training_does(trained) -> None:
    training, evaluation = (g.plan for g in trained[0]._graphs)
    assert [(g.group_before, g.group_after) for g in evaluation.gemms] == BORDERS
    assert evaluation.low_groups == training.low_groups
    assert {s.tensor for s in evaluation.sites} <= {s.tensor for s in training.sites}
    assert {(s.format, s.reads) for s in evaluation.sites} == {("1-8-22", "all")}, "forward computes high"


def test_a_plan_file_brings_its_grouping(trained) -> None:
    backend, path = trained
    assert '"grouping": "dataflow"' in path.read_text()
    assert Plan.load(path) == backend.plans[0]
    followed = eager_backend("packed", low_ratio=None, plan=str(path))
    torch._dynamo.reset()
    torch.compile(Residual(), backend=followed)(torch.randn(4, 8), torch.randn(4, 8)).backward()
    assert followed.plans[0].formats == backend.plans[0].formats
    words = explain(backend.plans[0], backend.plans[0].sites[0].tensor)
    assert words[1].startswith("  group 0 of 4, ")


def test_a_plan_of_the_other_grouping_is_refused(tmp_path: Path) -> None:
    path, model, x = tmp_path / "plan.json", nn.Linear(8, 8), torch.randn(4, 8)
    backend = eager_backend("packed")
    torch.compile(model, backend=backend)(x).sum().backward()
    backend.plans[0].save(path)
    assert "grouping" not in path.read_text(), "today's plan files stay as they are"
    torch._dynamo.reset()
    words = r"the plan was made with grouping='execution', and grouping='dataflow' is asked for; leave grouping= out"
    with pytest.raises(Exception, match=words):
        torch.compile(model, backend=eager_backend("packed", low_ratio=None, plan=str(path), grouping="dataflow"))(x)


def test_a_residual_cnn_trains_with_its_ends_high() -> None:
    backend = eager_backend("simulate", grouping="dataflow", low_ratio=0.3, keep_high="ends")
    compare(Cnn, [(torch.randn(4, 3, 8, 8),)], backend, tolerance=1e-3)
    (plan,) = backend.plans
    assert [(g.group_before, g.group_after) for g in plan.gemms] == [(0, 1), (1, 1), (1, 2)]


FACTORY = """import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def make():
    return nn.Sequential(Block(), Block()), torch.ones(3, 4)
"""


def test_a_folder_that_changes_while_it_is_searched_is_an_error_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(path: Path, pattern: str) -> list[Path]:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "glob", vanished)
    with pytest.raises(PlanError, match=r"cannot be searched \(No such file or directory\); give a folder that dump="):
        plans_of(tmp_path)


def test_dump_and_report(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    out = tmp_path / "dump"
    torch._dynamo.reset()
    for command in (
        ["dump", f"{tmp_path}/net.py:make", "--out", out, "--grouping", "dataflow"],
        ["report", "--dot", out],
    ):
        assert exit_code(*command) == 0
    (plan,) = plans_of(out).values()
    assert (len(plan.gemms), len(plan.groups)) == (4, 3)
    dot = (out / "graph-0" / "graph.dot").read_text()
    assert [f"cluster_{g}" in dot for g in range(4)] == [True, True, True, False]
    assert '"grouping": "dataflow"' in (out / "graph-0" / "report.html").read_text().replace('":"', '": "')
