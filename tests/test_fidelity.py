"""benchmarks/fidelity: what its figures are, that a failure is a row, and one architecture of transformers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not installed

from benchmarks.fidelity import __main__ as fidelity
from benchmarks.fidelity import architectures
from benchmarks.fidelity.one_step import Row, Step, cosine, float32_step, measure
from benchmarks.fidelity.sides import AUTOCAST, available
from benchmarks.fidelity.summary import lines, summarise
from benchmarks.fidelity.training import Run
from benchmarks.fidelity.training import lines as training_lines

LOW = next(side for side in reversed(available()) if side.startswith("fp8 1"))


class Small:
    """Two linear layers in an `Architecture`'s place."""

    def build(self):
        model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(32, 8)
        return model, lambda called: called(x).square().mean()


class Broken:
    def build(self):
        raise ValueError("no such class\nand more")


class Drifting(Small):
    """Every step has another batch."""

    def build(self):
        model, _ = super().build()
        return model, lambda called: called(torch.randn(32, 8) * next(self.scales)).square().mean()

    scales = iter(range(1, 100))


@pytest.fixture(autouse=True)
def of_tests(monkeypatch):
    made = {"small": Small(), "broken": Broken(), "drifting": Drifting()}
    monkeypatch.setattr(architectures, "ARCHITECTURES", architectures.ARCHITECTURES | made)
    monkeypatch.setattr("benchmarks.fidelity.one_step.ARCHITECTURES", architectures.ARCHITECTURES)


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_a_run_measures_what_can_run_and_reports_what_cannot(tmp_path, capsys):
    seen = []
    rows = fidelity.run(["small", "broken"], [AUTOCAST, LOW], "eager", after=lambda rows: seen.append(len(rows)))
    assert seen == [2, 4], "results can be written after each architecture"
    autocast, low, *failed = rows
    assert 0 < autocast.gradient_error < low.gradient_error
    assert 0.99 < low.cosine < autocast.cosine < 1
    assert low.worst_cosine <= low.cosine + 1e-6
    assert low.saved_ratio < 0.5
    assert [row.error for row in failed] == ["ValueError: no such class"] * 2
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"rows": {"rows": [asdict(row) for row in rows]}}), encoding="utf-8")
    kept = fidelity.rows_of(path)
    assert kept == [autocast, low], "what failed is tried again"
    capsys.readouterr()
    assert fidelity.run(["small"], [AUTOCAST, LOW], "eager", done=kept) == kept
    assert capsys.readouterr().out == "", "nothing was measured twice"


def test_steps_that_differ_by_themselves_are_refused():
    with pytest.raises(RuntimeError, match="two float32 steps differ"):
        float32_step("drifting")


def test_a_gradient_that_is_missing_is_an_error():
    reference = float32_step("small")
    without = Step(reference.loss, {name: g for name, g in reference.gradients.items() if name != "0.bias"})
    row = measure("small", AUTOCAST, Step(without.loss, without.gradients), "eager")
    assert row.error == "RuntimeError: other parameters have gradients than in float32: 0.bias"


def test_a_cosine_that_is_no_number_is_the_worst():
    ones = torch.ones(4, dtype=torch.float64)
    assert cosine(ones, 2 * ones) == pytest.approx(1)
    assert cosine(ones, ones * torch.inf) == cosine(ones, 0 * ones) == 0


def test_the_summary_names_the_worst_and_the_failed():
    rows = [
        Row(name, LOW, loss_error=e, cosine=1 - e, worst_cosine=0.9)
        for name, e in zip("abcde", (3, 1, 5, 4, 2), strict=True)
    ]
    rows.append(Row("f", LOW, error="ValueError: no"))
    (found,) = summarise(rows, [LOW])
    assert found["loss_error"] == {"median": 3, "worst": 5, "worst_of": ["c", "d", "a"]}
    assert found["cosine"] == {"median": -2, "worst": -4, "worst_of": ["c", "d", "a"]}
    assert (found["architectures"], found["failed"]) == (5, ["f"])
    assert lines(rows, [LOW])[-1].endswith("failed: f")


def test_training_is_compared_at_the_same_seeds():
    runs = [
        Run(side, seed, loss, 0.0, 0, 0.0)
        for side, seed, loss in ((AUTOCAST, 0, 2.0), (AUTOCAST, 1, 3.0), (LOW, 1, 3.5))
    ]
    assert [line.split(", ")[1] for line in training_lines(runs)] == ["+0.0000 from autocast", "+0.5000 from autocast"]


@pytest.mark.filterwarnings("ignore")
def test_an_architecture_of_transformers_is_close_to_float32_under_autocast():
    pytest.importorskip("transformers")
    (row,) = fidelity.run(["llama"], [AUTOCAST], "eager")
    assert row.error is None
    assert row.cosine > 0.9999
    assert row.loss_error < 1e-4


def test_at_least_thirty_architectures_of_all_families_have_names_of_their_own():
    known = architectures.ARCHITECTURES
    assert len({(a.model) for a in known.values() if isinstance(a, architectures.Architecture)}) >= 45
    families = {a.family for a in known.values() if isinstance(a, architectures.Architecture)}
    assert families == {*architectures.BATCHES, "torchvision"}
