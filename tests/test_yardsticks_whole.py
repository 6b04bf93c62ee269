"""Whole models judged as benchmarks.yardsticks judges those of public suites, which are read by path."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.yardsticks import dynamo_models, paritybench, table, whole
from benchmarks.yardsticks.op_db import FAILED, LEFT_OUT, PASSED, Cell, Row
from fxprec.passes.analysis import sensitive
from fxprec.passes.compare_in_forward import CompareInForward

CASES = """
class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by, self.layer = by, nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x) * self.by

TESTCASES = [
    # (nn.Module, init_args, forward_args, jit_compiles)
    (Scaled,
     lambda: ([], {'by': 2.0}),
     lambda: ([torch.rand([4, 8])], {}),
     True),
]
"""


class Overlap(nn.Module):
    """The intersection over union of boxes, given by corners."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        low, high = torch.maximum(one[:, :2], other[:, :2]), torch.minimum(one[:, 2:], other[:, 2:])
        inside = (high - low).clamp(min=0).prod(-1)
        both = sum((box[:, 2:] - box[:, :2]).prod(-1) for box in (one, other))
        return inside / (both - inside + 1e-6)


def boxes() -> whole.Made:
    corners = torch.rand(2, 64, 2) * 0.2
    one, other = torch.cat([corners, corners + 0.7 + torch.rand(2, 64, 2) * 0.2], -1).requires_grad_()
    return Overlap(), (one.detach().requires_grad_(), other.detach().requires_grad_()), {}


def test_the_overlap_of_boxes_in_8_bits() -> None:
    """Its gradient was off by 100 %: it goes to the larger of two numbers, and their copies were equal."""
    row = whole.measure(whole.Model("overlap", boxes), ["near", "fp8"])
    assert [row.cells[name].verdict for name in ("near", "fp8")] == [PASSED, PASSED], row


def test_a_wrong_gradient_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8-bit copies compared, as it was."""
    monkeypatch.setattr(CompareInForward, "apply", lambda self, work: None)
    monkeypatch.setattr(sensitive, "kept", lambda grouped: {})
    row = whole.measure(whole.Model("overlap", boxes), ["fp8"])
    assert row.cells["fp8"].verdict == FAILED
    assert "a gradient is off by" in row.cells["fp8"].detail
    assert row.cells["aot"].verdict == PASSED, "which runs where a recipe fails"


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda: (nn.Linear(2, 2), (torch.ones(3),), {}), "RuntimeError"), (lambda: os._exit(3), "process ended with 3")],
    ids=["raises", "ends its process"],
)
def test_what_plain_torch_does_not_run_is_left_out(make, why: str) -> None:
    model = whole.Model("broken", make)
    row = whole.apart(model.name, lambda: whole.measure(model, ["fp8"]), seconds=60)
    assert why in row.left_out
    assert not row.samples


def test_a_small_gradient_is_measured_by_all_of_them() -> None:
    exact = whole.Numbers([], {"large": torch.ones(4), "small": torch.full((4,), 1e-3)})
    found = whole.Numbers([], {"large": torch.ones(4)})
    assert whole.errors(found, exact)[1] == pytest.approx(1e-3 / whole.SMALL, rel=1e-3)


def test_paritybench_is_read_by_path(tmp_path: Path) -> None:
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "test_someone_project.py").write_text(
        "import torch, not_installed.part\nfrom torch import nn\n" + CASES, encoding="utf-8"
    )
    (model,) = paritybench.models(tmp_path)
    assert model.name == "someone_project.Scaled"
    row = whole.measure(model, ["near"])
    assert row.cells["near"].verdict == PASSED, row
    with pytest.raises(FileNotFoundError, match=r"give the root of a checkout"):
        paritybench.models(tmp_path / "generated")


def test_the_lists_are_read_by_path_and_equal_blocks_are_cut(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "dynamo").mkdir(parents=True)
    (tmp_path / "benchmarks" / "dynamo" / "timm_models_list.txt").write_text("b 8\na 128\n", encoding="utf-8")
    assert {model.name for model in dynamo_models.models(tmp_path, "timm")} == {"a", "b"}
    blocks = nn.Sequential(nn.Linear(2, 4), *(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 2))
    assert [tuple(layer.weight.shape) for layer in dynamo_models._cut(blocks)] == [(4, 2), (4, 4), (4, 4), (2, 4)]
    assert blocks(torch.ones(1, 2)).shape == (1, 2)


def test_the_table_has_a_row_a_suite() -> None:
    from benchmarks.yardsticks.__main__ import summary

    rows = [Row("one", 1, {"fp8": Cell(PASSED)}), Row("other", 1, {"fp8": Cell(FAILED)}), Row("none", left_out="no")]
    found = summary(rows)
    assert found["fp8"] == {PASSED: 1, FAILED: 1, "refused": 0, LEFT_OUT: 1}
    header, line, _ = table.text({"suite": {"rows": {"summary": found}}}).splitlines()
    place = header.split().index("fp8")
    assert line.split("  ")[0] == "suite"
    assert [cell.strip() for cell in re.findall(r"-|\d / \d / \d / \d", line)][place - 1] == "1 / 1 / 0 / 1"
