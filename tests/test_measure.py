"""``fxprec measure``: what a training step takes, beside what torch's own compilations take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import exit_code
from test_commands import printed
from torch import Tensor, nn

from fxprec.compat import allocated_peak
from fxprec.diagnosis.measured import check_side, measure
from fxprec.diagnosis.subject import Subject
from fxprec.errors import ConfigError

TARGETS = """import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(2048, 64)

def fails_in_training():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 2)), torch.ones(3, 4)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_peak_is_of_what_lives_at_once() -> None:
    def run() -> Tensor:
        first = torch.ones(1000, 1000)
        second = first + 1  # beside the first
        del first
        return second.sum()  # four bytes

    assert 8_000_000 <= allocated_peak(run) < 8_001_000


def test_loss_gradients_and_bytes_of_a_side() -> None:
    model, batch = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(512, 64)
    found = measure(Subject.of(model, batch), "fp8", {"lowering": "eager"}, 2)
    loss = model(batch).square().mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert found.loss == pytest.approx(loss.item(), rel=0.01)
    assert found.gradient_norm == pytest.approx(norm.item(), rel=0.02)
    assert found.saved_bytes == 512 * (64 + 2 * 256), "an input in 8 bits, and what tanh returns in 16"
    assert found.peak_bytes > sum(p.nbytes for p in model.parameters()) + found.saved_bytes
    assert 0 < found.step_s < found.first_s
    assert all(p.grad is not None for p in model.parameters()), "the measured model is a copy"


def test_a_side_is_inductor_autocast_or_a_recipe() -> None:
    assert check_side("autocast", {}) is None
    config = check_side("fp8", {"peak_budget": "60%"})
    assert config is not None
    assert config.peak_budget == "60%"
    with pytest.raises(ConfigError, match="unknown recipe 'fp9'; did you mean 'fp8'"):
        check_side("fp9", {})


def test_a_side_that_fails_is_named_with_its_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("measure", "t.py:fails_in_training", "--sides", "inductor,fp8") == 2
    error = capsys.readouterr().err
    assert "inductor: Sequential does not run on its batch, uncompiled either" in error
    assert error.count("\n") == 1


def test_a_budget_out_of_one_sides_reach_leaves_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What had been measured before was thrown away."""

    def measured(target: str, side: str, options: Sequence[str]) -> dict[str, Any]:
        if side in ("bf16", "fp32"):
            raise ConfigError(f"{side}: peak_budget is out of reach")
        return {"side": side}

    monkeypatch.setattr("fxprec.commands.measure._in_a_process", measured)
    asked = ("measure", "t.py:make", "--sides", "inductor,bf16,fp8,fp32", "--json")
    assert exit_code(*asked, "--peak-budget", "60%") == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [row["side"] for row in found["rows"]] == ["inductor", "fp8"]
    assert found["failed"]["bf16"] == "bf16: peak_budget is out of reach"
    assert "not measured: bf16, fp32, as said above; the other sides were" in printed.err
    assert exit_code(*asked) == 2
    assert capsys.readouterr().err.endswith("error: bf16: peak_budget is out of reach\n")


@pytest.mark.inductor
def test_sides_are_measured_each_in_a_process_of_its_own(here: Path) -> None:
    found = printed("measure", "t.py:make", "--sides", "autocast,fp8", "--steps", "2", "--peak-budget", "100%")
    autocast, fp8 = found["rows"]
    assert (autocast["side"], fp8["side"]) == ("autocast", "fp8")
    assert autocast["saved_bytes"] is None
    assert fp8["saved_bytes"] == 2048 * (64 + 2 * 256)
    assert fp8["loss"] == pytest.approx(autocast["loss"], rel=0.01)
    assert fp8["gradient_norm"] == pytest.approx(autocast["gradient_norm"], rel=0.02)
    assert fp8["peak_bytes"] < autocast["peak_bytes"]


@pytest.mark.inductor
def test_the_table_has_shares_of_autocasts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("measure", "t.py:make", "--sides", "autocast", "--steps", "1") == 0
    said = capsys.readouterr().out
    assert "Shares are of autocast's" in " ".join(said.split())
    row = next(line.split() for line in said.splitlines() if line.strip().startswith("autocast"))
    assert row[2] == row[4] == "1.00"
