"""Whole models judged as benchmarks.yardsticks judges those of public suites, which are read by path."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.yardsticks import dynamo_models, paritybench, table, torchbench, whole
from benchmarks.yardsticks.__main__ import main
from benchmarks.yardsticks.cells import (
    BY_INDUCTOR,
    FAILED,
    LEFT_OUT,
    PASSED,
    RECIPES,
    REFUSED,
    Cell,
    Row,
    against,
    backend_of,
)
from benchmarks.yardsticks.kept import Kept, read, summary
from benchmarks.yardsticks.products import ProductsInBf16
from benchmarks.yardsticks.rounded_copies import rounded, save_in_e4m3fn
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


class Tiny(nn.Module):
    """Its activations have rms 0.0003, of which e4m3fn holds next to nothing without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) * 5e-4)
        return out


def test_the_third_step_is_judged_and_the_first_is_noted() -> None:
    row = whole.measure(whole.Model("tiny", lambda: (Tiny(), (torch.randn(64, 32),), {})), ["fp8"])
    cell = row.cells["fp8"]
    assert cell.verdict == PASSED, cell
    assert cell.first[1] > 10 * cell.gradients
    assert cell.note.startswith("first step: a gradient is off by"), cell
    worse = against([(0.0, 0.1), (0.0, 0.1), (0.0, 0.5)], (1.0, 0.2))
    assert (worse.verdict, worse.detail) == (FAILED, "a gradient is off by 0.5, at most 0.2")


class Carries(nn.Module):
    """Keeps what the last step computed, graph and all: its second step raises in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.last = (self.layer(x) + self.last).tanh()
        return self.last


def test_a_model_that_cannot_take_three_steps_takes_one() -> None:
    reference = whole.Reference.of(whole.Model("carries", lambda: (Carries(), (torch.ones(4, 4),), {})))
    assert len(reference.exact) == 1


def test_the_columns_of_inductor_are_run_through_inductor() -> None:
    """Column fp32 was run by the reference lowering, and its failures were compared with Inductor's."""
    lowered = {column: backend_of(column).config.lowering for column in RECIPES}
    assert {column for column, lowering in lowered.items() if lowering == "inductor"} == {"fp32", "compiled"}
    assert set(BY_INDUCTOR) == {"fp32", "compiled"}
    assert "Inductor compiles as without fxprec" in backend_of("fp32").summary()


def test_torchbench_is_read_by_path(tmp_path: Path) -> None:
    lists, folder = tmp_path / "benchmarks" / "dynamo", tmp_path / "torchbenchmark" / "models" / "small"
    lists.mkdir(parents=True)
    folder.mkdir(parents=True)
    for kind in ("all_torchbench", "torchbench"):
        (lists / f"{kind}_models_list.txt").write_text("small,8\nresnet18,4\n", encoding="utf-8")
    for path in (folder.parent.parent, folder.parent):
        (path / "__init__.py").write_text("", encoding="utf-8")
    (folder / "__init__.py").write_text(
        "import torch\nimport not_installed_either\nclass Model:\n"
        "    def __init__(self, test, device, batch_size): self.batch = batch_size\n"
        "    def get_module(self): return torch.nn.Linear(4, 4), (torch.ones(self.batch, 4),)\n",
        encoding="utf-8",
    )
    names = {model.name: model for model in torchbench.models(tmp_path, tmp_path)}
    assert names.keys() == {"small", "resnet18"}
    module, (x,), _ = torchbench._from(tmp_path, "small")
    assert module(x).shape == (torchbench.BATCH, 4)
    with pytest.raises(FileNotFoundError, match="root of a checkout of torchbench"):
        torchbench.models(tmp_path, folder)


def test_a_wrong_gradient_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8-bit copies compared, as it was."""
    monkeypatch.setattr(CompareInForward, "apply", lambda self, work: None)
    monkeypatch.setattr(sensitive, "reasons_high", lambda grouped: {})
    row = whole.measure(whole.Model("overlap", boxes), ["fp8"])
    assert row.cells["fp8"].verdict == FAILED
    assert "a gradient is off by" in row.cells["fp8"].detail
    assert row.cells["aot"].verdict == PASSED, "which runs where a recipe fails"
    assert row.cells["fp8"].note.startswith("plain torch that saves in e4m3fn: a gradient is off by ")
    assert 0.1 < float(row.cells["fp8"].note.split()[-1]) < 1, "plain torch compares rounded copies too"


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


def test_a_model_that_a_limit_ends_is_late() -> None:
    row = whole.apart("slow", lambda: os.kill(os.getpid(), signal.SIGXCPU), seconds=60)
    assert (row.late, row.left_out) == ("longer than 60 s", "")


def test_a_model_that_waits_is_late() -> None:
    row = whole.apart("waits", lambda: time.sleep(60), seconds=0.1)
    assert row.late == "longer than 0.1 s"


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


PYTORCHS = """
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, load_tests

class TestSmall(TestCase):
    def test_right(self):
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sin().sum().backward()
    def test_wrong(self):
        self.assertEqual(torch.ones(2).sin(), torch.ones(2))
    def test_nothing(self):
        self.assertEqual(1, 1)
    def test_elsewhere(self):
        self.assertEqual(torch.ones(2, device="xpu").cuda().sin().device.type, "cuda")
    def test_undefined(self):
        x = torch.ones(2, requires_grad=True)
        y, z = x.sin(), x.cos()
        (y * z).sum().backward()
        torch._dynamo.graph_break()
        assert not torch._dynamo.config.compiled_autograd
"""
FOR_EACH_DEVICE = """
class TestDevices(TestCase):
    def test_a_gpu(self, device):
        self.assertNotEqual(torch.ones(2, device=device).sin().device.type, "cuda")

instantiate_device_type_tests(TestDevices, globals())
"""


def test_pytorchs_tests_are_read_by_path(tmp_path: Path) -> None:
    """In a process of their own: torch's test utilities read at their import what to compile with."""
    (tmp_path / "test_small.py").write_text(PYTORCHS, encoding="utf-8")
    (tmp_path / "test_devices.py").write_text(PYTORCHS + FOR_EACH_DEVICE, encoding="utf-8")
    module = "benchmarks.yardsticks"
    command = [sys.executable, "-m", module, "tests", "--recipes", "plain", "--checkout", str(tmp_path)]

    def run(file: str, *tests: str) -> str:
        names = [f"{file}.{name}" for name in tests]
        here = {"capture_output": True, "text": True, "cwd": Path(__file__).parents[1]}
        return subprocess.run([*command, "--file", f"{file}.py", "--only", *names], check=False, **here).stdout

    small = [f"TestSmall.test_{name}" for name in ("right", "wrong", "nothing", "elsewhere", "undefined")]
    said = run("test_small", *small)
    assert "plain     passed 3  failed 0  refused 0  left out 2" in said, "what fails under aot too is left out"
    assert "aot       passed 0  failed 1" in said
    assert "left out: Dynamo compiles nothing of it" in said
    said = run("test_devices", "TestDevicesCPU.test_a_gpu_cpu")
    assert "plain     passed 1" in said, "a file with tests for each device is read as it is"


def test_what_the_tests_tolerance_cannot_judge_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option was ignored."""
    given = ["yardsticks", "tests", "--checkout", ".", "--file", "test_small.py", "--recipes", "near", "fp8"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit):
        main()
    assert "fp8: the tests' tolerance has near, plain, fp32" in capsys.readouterr().err


def test_the_lists_are_read_by_path_and_equal_blocks_are_cut(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "dynamo").mkdir(parents=True)
    (tmp_path / "benchmarks" / "dynamo" / "timm_models_list.txt").write_text("b 8\na 128\n", encoding="utf-8")
    assert {model.name for model in dynamo_models.models(tmp_path, "timm")} == {"a", "b"}
    blocks = nn.Sequential(nn.Linear(2, 4), *(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 2))
    assert [tuple(layer.weight.shape) for layer in dynamo_models._cut(blocks)] == [(4, 2), (4, 4), (4, 4), (2, 4)]
    assert blocks(torch.ones(1, 2)).shape == (1, 2)


def test_a_run_that_is_ended_keeps_its_rows_and_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was written after the last row: what was ended before had none."""
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    first = Kept.of("part", [])
    first.add(Row("one", 1, {"fp8": Cell(PASSED, 0.1, 0.2, first=[0.1, 0.3])}))
    first.add(Row("slow", late="longer than 60 s"))
    first.add(Row("none", left_out="no"))
    (path,) = tmp_path.iterdir()
    second = Kept.of("whole", [path])
    assert [second.has(name, ["fp8"]) for name in ("one", "slow", "none", "other")] == [True, False, True, False]
    second.add(Row("slow", 1, {"fp8": Cell(FAILED)}))
    assert second.path is not None
    assert read(second.path) == [first.rows[0], first.rows[2], second.rows[-1]]
    assert Kept.of("whole", [path, second.path]).rows[1].cells["fp8"].verdict == FAILED


def test_a_column_is_added_to_the_rows_of_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that had any column was taken for whole: another column was never measured."""
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    first = Kept("part", note="In fp32.")
    first.add(Row("one", 1, {"fp32": Cell(PASSED, 0.1)}))
    first.add(Row("slow", 1, {"fp32": Cell(PASSED, 0.1)}))
    first.add(Row("none", left_out="no"))
    (path,) = tmp_path.iterdir()
    second = Kept.of("part", [path])
    assert [second.has(name, ["compiled"]) for name in ("one", "slow", "none")] == [False, False, True]
    second.add(Row("one", 1, {"compiled": Cell(PASSED, 0.2)}))
    second.add(Row("slow", late="longer than 60 s"))
    assert [sorted(row.cells) for row in read(path)] == [["compiled", "fp32"], ["fp32"], []]
    third = Kept.of("part", [path])
    assert third.note == "In fp32."
    assert [third.has(name, ["fp32", "compiled"]) for name in ("one", "slow")] == [True, False]
    assert third.rows[1].samples == 1
    assert summary(third.rows)["compiled"]["late"] == 1


def test_the_table_has_a_row_a_suite() -> None:
    rows = [Row("one", 1, {"fp8": Cell(PASSED)}), Row("other", 1, {"fp8": Cell(FAILED)}), Row("none", left_out="no")]
    found = summary(rows)
    assert found["fp8"] == {PASSED: 1, FAILED: 1, "refused": 0, LEFT_OUT: 1, "late": 0}
    header, line, _ = table.text({"suite": {"rows": {"summary": found}}}).splitlines()
    place = header.split().index("fp8")
    assert line.split("  ")[0] == "suite"
    assert [cell.strip() for cell in re.findall(r"-|\d / \d / \d / \d", line)][place - 1] == "1 / 1 / 0 / 1"
    late = summary([*rows, Row("slow", late="longer than 60 s")])
    assert "1 / 1 / 0 / 1 / 1" in table.text({"suite": {"rows": {"summary": late}}})


class Mixed(nn.Module):
    """Writing into the table refuses the bfloat16 that autocast makes of the Linear's result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(4, 64, dtype=x.dtype)
        table[torch.arange(4)] = self.linear(x)
        return table.sin()


def test_where_autocast_refuses_a_model_products_in_bfloat16_are_the_bound() -> None:
    reference = whole.Reference.of(whole.Model("mixed", lambda: (Mixed(), (torch.randn(4, 64),), {})))
    assert reference.autocast.verdict == REFUSED
    assert all(2**-12 < error < 2**-6 for error in reference.bf16)
    assert reference.bounds("bf16")[1] == pytest.approx(3 * reference.bf16[1], rel=0.5)


def test_saved_activations_are_rounded_and_weights_are_not() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    x, incoming = torch.randn(16, 8, requires_grad=True), torch.randn(16, 4)
    hidden = layers[0](x).detach()
    save_in_e4m3fn(layers)
    layers(x).backward(incoming)
    assert torch.equal(layers[1].weight.grad, incoming.mT @ rounded(hidden))
    assert (rounded(hidden) - hidden).abs().max() <= 2**-4 * hidden.abs().max()
    assert not torch.equal(rounded(hidden), hidden)
    assert torch.equal(x.grad, incoming @ layers[1].weight @ layers[0].weight)


def test_products_round_operands_and_results() -> None:
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    incoming = torch.randn(3, 4)
    with ProductsInBf16():
        y = x @ w
        y.backward(incoming)
    low = [t.detach().bfloat16() for t in (x, w, incoming)]
    assert torch.equal(y, (low[0] @ low[1]).float())
    assert torch.equal(x.grad, (low[2] @ low[1].mT).float())
    assert torch.equal(w.grad, (low[0].mT @ low[2]).float())
