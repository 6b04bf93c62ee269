"""``fxprec gpu-check`` without a GPU: what it finds wrong it says, goes on, and refuses what it cannot check."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import exit_code
from gpu import faults
from interpreted import OLD_INTERPRETER

from fxprec.errors import GpuCheckError
from fxprec.gpu_check import machine, run, warm_start
from fxprec.gpu_check.findings import Findings
from fxprec.gpu_check.ground import Ground, same, within
from fxprec.gpu_check.items import ITEMS, Item, chosen
from fxprec.gpu_check.report import MAX_LINES, Report

TESTS = Path(__file__).parents[1]


@pytest.fixture
def faults_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let items' processes import from tests/; return the file in which the hanging one notes its child."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(faults.CHILD, str(tmp_path / "child"))
    return tmp_path / "child"


def test_what_fails_is_named_and_the_others_go_on(
    faults_at_hand: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.IMPORTED, "interpreted", ("fxprec.gpu_check.ground",))
    found = run.run_items(faults.ITEMS, dry=True, limit=4)
    status = {f.item: f.status for f in found}
    assert status == dict.fromkeys(faults.NAMES, "failed") | {"passes": "passed", "last": "passed", "skips": "skipped"}
    why = {f.item: f.failed[0]["why"] for f in found if f.failed}
    assert why == {
        "raises": "codes: 3 of 8 differ",
        "exits": "the process ended with exit code 3 in case 'exits in the middle': "
        "CUDA error: an illegal memory access",
        "leaves": "the process ended before it was done in case 'leaves as if all was well'",
        "crashes": "the process was ended by SIGSEGV in case 'reads address 0'",
        "hangs": "the process was not done after 4 s in case 'waits for ever'",
    }
    raised = next(f for f in found if f.item == "raises")
    assert (raised.failed[1]["why"], raised.passed) == ("ValueError: no such kernel", ["right"])
    assert "string_at" in next(f for f in found if f.item == "crashes").output
    assert "in hangs" in next(f for f in found if f.item == "hangs").output, "where it was when its time was over"
    assert not _is_alive(int(faults_at_hand.read_text(encoding="utf-8"))), "what the item started ends with it"
    report = Report(faults.ITEMS, tuple(found), 12.3, dry=True)
    assert not report.has_passed
    text = report.text()
    assert text.splitlines()[-1] == ("FAILED: raises, exits, leaves, crashes, hangs (dry run); 12 s to the verdict")
    assert "FAIL    hangs" in text
    assert "skipped skips" in text


def _is_alive(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":  # ended, and nobody has asked yet
            return False
        time.sleep(0.1)
    return True


def test_one_wrong_code_fails_the_format_it_is_in(faults_at_hand: Path) -> None:
    """The lowest bit of one code of 1-5-2: the other formats pass."""
    pytest.importorskip("triton")
    (found,) = run.run_items([Item("casts", "codes", "gpu.faults_of.wrong_code")], dry=True, limit=300)
    if OLD_INTERPRETER in json.dumps(found.to_dict()):
        pytest.skip("the interpreter of this Triton (3.6) takes no NumPy 2.4 arrays as bounds of a loop")
    assert [f["case"] for f in found.failed] == ["quantize+transpose to 1-5-2"]
    assert found.failed[0]["why"].startswith("codes, 64 x 32: 1 of 2048 differ, the first at [0, 0]: ")
    assert "quantize+transpose to e4m3fn" in found.passed


def test_a_host_that_cannot_start_is_a_failure_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.IMPORTED, "interpreted", ("no_such_module",))
    (found,) = run.run_items(ITEMS[:1], dry=True, limit=30)
    assert found.failed[0]["why"] == (
        "the process could not be started: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_an_item_imports_what_it_runs() -> None:
    """On a GPU nothing is imported before an item, and an operator without a kernel would be no fault of the GPU."""
    pytest.importorskip("triton")
    code = (
        "import torch, fxprec.gpu_check.kernels\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print([n for n in ('gathered', 'totals', 'quantize_transpose') if not has(f'fxprec::{n}', 'CUDA')])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_dry_run_checks_every_item(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    arguments = ["gpu-check", "--dry", "--limit", "300", "--out", str(tmp_path)]
    command = f"from fxprec.cli import main; main({arguments})"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=550, check=False)
    if OLD_INTERPRETER in done.stdout:
        pytest.skip("the interpreter of this Triton (3.6) takes no NumPy 2.4 arrays as bounds of a loop")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all passed (dry run)" in done.stdout
    report = json.loads((tmp_path / "gpu-check.json").read_text(encoding="utf-8"))
    assert {f["item"] for f in report["items"]} == {item.name for item in ITEMS}
    assert {f["item"] for f in report["items"] if f["status"] != "passed"} == {"warm-start"}, "which needs a GPU"
    assert all(f["status"] in ("passed", "skipped") for f in report["items"])
    assert {f["item"] for f in report["items"] if f["mode"] == "compiled"} == {"casts", "products", "kernels"}
    assert [f["passed"] for f in report["items"] if f["mode"] == "compiled"] == [
        ["sm_80", "sm_89", "sm_90", "sm_100"]
    ] * 3
    left = {f["item"]: f["left_out"] for f in report["items"] if f["mode"] == "interpreted" and f["left_out"]}
    assert set(left) == {
        "kernels",
        "transformer",
        "cuda-graphs",
        "peak-budget",
        "warm-start",
        "step-time",
        "second-gpu",
    }
    assert all(entry["why"] == "needs a GPU" for entries in left.values() for entry in entries[-1:])
    text = (tmp_path / "gpu-check.txt").read_text(encoding="utf-8").splitlines()
    assert len(text) <= MAX_LINES
    assert text[0] == "fxprec gpu-check: without a GPU (--dry)"


def test_a_machine_without_a_gpu_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "torch 2.13.0 was built without CUDA; install a build for CUDA"
    refused = Findings("machine", "gpu", refused=why)
    monkeypatch.setattr(run, "run_items", lambda *args, **options: [refused])
    assert exit_code("gpu-check", "--out", tmp_path) == 2
    assert capsys.readouterr().err == f"fxprec: error: gpu-check: {why}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hip", "cuda", "capability", "said"),
    [
        ("6.2", None, None, "this torch is AMD's (ROCm 6.2): fxprec's code is for NVIDIA's GPUs"),
        (None, None, None, "was built without CUDA; install a build for CUDA"),
        (None, "13.0", None, "finds no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (None, "13.0", (7, 5), "device 'cuda:0' has compute capability 7.5: fxprec's code needs 8.0, for bfloat16"),
        (None, "13.0", (8, 0), None),
    ],
)
def test_what_is_refused_and_why(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, cuda: str | None, capability: tuple[int, int] | None, said: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    why = machine.refused()
    if said is None:
        assert why is None
    else:
        assert said in (why or "")
        assert "fxprec gpu-check --dry" in (why or "")


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--only", "cast"], "--only: unknown 'cast'; did you mean 'casts'?; allowed: machine, casts, "),
        (["--limit", "0"], "--limit is 0; give seconds above 0"),
        (["--limit", "nan"], "--limit is nan; give seconds above 0"),
    ):
        assert exit_code("gpu-check", *options) == 2
        assert said in capsys.readouterr().err
    assert [item.name for item in chosen(["products", "casts"])] == ["casts", "products"]


def ground() -> Ground:
    return Ground(torch.device("cpu"), "interpreted", Findings("x", "interpreted"), seconds=30)


def test_tensors_are_compared_bit_for_bit() -> None:
    here = ground()
    for name, found, wanted in (
        ("zeros", torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        ("shapes", torch.ones(2), torch.ones(2, 1)),
        ("dtypes", torch.ones(2), torch.ones(2).bfloat16()),
        ("NaN", torch.tensor([torch.nan, 1.0]), torch.tensor([2.0, 1.0])),
        ("codes", torch.tensor([200, 3], dtype=torch.uint16), torch.tensor([200, 2], dtype=torch.uint16)),
    ):
        with here.case(name):
            same(name, found, wanted)
    assert [f["why"] for f in here.findings.failed] == [
        "zeros: 1 of 2 differ, the first at [0]: 0.0, not -0.0",
        "shapes: (2,) torch.float32, not (2, 1) torch.float32",
        "dtypes: (2,) torch.float32, not (2,) torch.bfloat16",
        "NaN: 1 of 2 differ, the first at [0]: nan, not 2.0",
        "codes: 1 of 2 differ, the first at [1]: 3, not 2",
    ]
    with here.case("another NaN"):
        same("NaN", torch.tensor([torch.nan]), torch.tensor([-1], dtype=torch.int32).view(torch.float32))
    with here.case("a NaN is within nothing"):
        within("error", float("nan"), 1.0)
    assert here.findings.passed == ["another NaN"]
    assert here.findings.failed[-1]["why"] == "error is nan, above 1"


def test_a_side_that_may_not_end_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    here, clock = ground(), time.monotonic
    assert here.has_time("first")
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 25)
    assert not here.has_time("second")
    (entry,) = here.findings.left_out
    assert entry["what"] == "second"
    assert entry["why"].endswith("s of the limit were left; give --limit a larger one")


def test_the_peak_is_held_against_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with a measured peak that a stub gives: 1.05 of the budget passes, above fails."""
    from fxprec.gpu_check import budgets

    plan = SimpleNamespace(peak_bytes=SimpleNamespace(budget=1000, planned=1000, compiled=None))
    monkeypatch.setattr(budgets, "transformer", lambda *args, **options: torch.nn.Linear(1024, 1))
    monkeypatch.setattr(budgets.fxprec, "Backend", lambda config: SimpleNamespace(plans=[plan]))
    monkeypatch.setattr(torch, "compile", lambda model, backend: model)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    here = Ground(torch.device("cpu"), "gpu", Findings("x", "gpu"))
    for name, peak in (("at it", 1050), ("above it", 1051)):
        monkeypatch.setattr(budgets, "_peak", lambda ground, step, peak=peak: peak)
        with here.case(name):
            budgets._fits(here, "60%", {})
    assert here.findings.passed == ["at it"]
    assert [f["why"] for f in here.findings.failed] == ["bytes allocated over the budget is 1.051, above 1.05"]


def test_the_page_lists_the_items_in_their_order() -> None:
    text = (TESTS.parent / "docs/gpu.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE) == [item.name for item in ITEMS]


def test_a_long_report_is_cut_and_says_so() -> None:
    found = [Findings("casts", "gpu", passed=["x"], facts={f"figure {k}": k for k in range(100)})]
    found[0].fail("a", "1 of 2 differ", "Traceback\n  File x\n    line\nError")
    lines = Report(ITEMS, tuple(found), 1.0, dry=False).text().splitlines()
    assert len(lines) == MAX_LINES
    assert lines[-2].endswith("lines more in the JSON file)")
    assert lines[-1] == "FAILED: casts; 1 s to the verdict"


def _stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o700)
    monkeypatch.setattr(warm_start.sys, "executable", str(path))


STACK = 'Timeout (0:00:20)!\nThread 0x1 (most recent call first):\n  File "a.py", line 3 in waits\n  File "b.py", line 9 in main'


def test_a_process_says_how_long_its_first_step_took_and_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stand-ins for Python: one that is done, one that fails, one that hangs."""
    say = f"cat >&2 <<'END'\n{STACK}\nEND\n"
    _stand_in(monkeypatch, tmp_path, f"{say}echo a warning; echo '{json.dumps({'seconds': 2.5})}'")
    assert warm_start._process(str(tmp_path), 30.0) == (
        2.5,
        ['File "a.py", line 3 in waits', 'File "b.py", line 9 in main'],
    )
    _stand_in(monkeypatch, tmp_path, "echo no kernel >&2; exit 3")
    with pytest.raises(GpuCheckError, match=r"^exit code 3: no kernel$"):
        warm_start._process(str(tmp_path), 30.0)
    _stand_in(monkeypatch, tmp_path, f"{say}exec sleep 30")
    with pytest.raises(
        GpuCheckError, match=r'^not done after 1 s; it was in File "a.py", line 3 in waits; File "b.py"'
    ):
        warm_start._process(str(tmp_path), 1.0)


def test_a_slower_second_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 3.0])
    monkeypatch.setattr(warm_start, "_process", lambda folder, limit: (next(seconds), []))
    findings = Findings("warm-start", "gpu")
    ground = Ground(torch.device("cpu"), "gpu", findings)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    warm_start.check(ground)
    (failed,) = findings.failed
    assert failed["why"] == "the first step of the second process over that of the first is 1.5, above 1"
    assert findings.facts["first step, warm caches, s"] == 3.0
