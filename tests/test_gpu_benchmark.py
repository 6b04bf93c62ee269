"""The GPU suite runs through without a GPU; a failing section costs no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreted import OLD_INTERPRETER

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not installed

from benchmarks.gpu.suite import Row, Setting, Suite

ROOT = Path(__file__).parents[1]


def test_every_section_runs_through_at_tiny_sizes(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    if OLD_INTERPRETER in run.stdout:
        pytest.skip("the interpreter of this Triton (3.6) takes no NumPy 2.4 arrays as bounds of a loop")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    sections = {row["section"] for row in found["rows"]}
    assert sections == {"correct", "memory", "gemm", "block", "statistics", "1.5B model", "ResNet-50"}
    assert all(row["met"] for row in found["rows"] if row["section"] == "correct")
    assert all(row["met"] is None for row in found["rows"] if row["section"] != "correct"), "such sizes judge nothing"
    assert found["machine"]["gpu"] is None


def test_a_failing_section_is_reported_and_the_next_one_runs(capsys) -> None:
    def broken(setting: Setting):
        yield Row("broken", "one row", 1.0, "x")
        raise RuntimeError("no such kernel\nand more")

    def whole(setting: Setting):
        yield Row("whole", "speed", 0.5, "x", ">= 1", False)

    suite = Suite(Setting(torch.device("cpu"), tiny=False, repeats=1))
    suite.run({"broken": broken, "whole": whole})
    assert [row.name for row in suite.rows] == ["one row", "speed"]
    assert [f.reason for f in suite.failures] == ["RuntimeError: no such kernel"]
    assert "MISSED" in capsys.readouterr().out
    late = Suite(Setting(torch.device("cpu"), tiny=False, repeats=1, deadline=0.0))
    late.run({"whole": whole})
    assert not late.rows
    assert late.failures[0].reason.startswith("not begun: the time is over")


def test_a_gpu_without_fp8_gets_packed_codes_and_no_fp8_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an A100 a section ended at its first 8-bit float."""
    from benchmarks.gpu import correctness, gemm, memory_bound

    monkeypatch.setattr("fxprec.compat.no_native_fp8", lambda device: "no casts")
    setting = Setting(torch.device("cpu"), tiny=True, repeats=1)
    for make in (memory_bound._quantize, memory_bound._norm, memory_bound._norm_backward, memory_bound._gate_backward):
        call, inputs = make(4, 8, setting)
        dtypes = {x.dtype for x in (*call(), *inputs)}
        assert torch.uint8 in dtypes
        assert not {torch.float8_e4m3fn, torch.float8_e5m2} & dtypes
    for name in ("_codes", "_native", "_step"):
        monkeypatch.setattr(correctness, name, lambda setting, name=name: name)
    monkeypatch.setattr(correctness, "_products", lambda setting: iter(()))
    monkeypatch.setattr(gemm, "_generated", lambda setting: iter(["generated"]))
    assert list(correctness.correctness(setting)) == ["_codes", "_step"]
    assert list(gemm.gemm(setting)) == ["generated"]
