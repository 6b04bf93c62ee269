"""`fxprec.choose`: the ratio that holds most low at an acceptable cost (Lee et al. 2023, 5.5)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_helpers import Loud
from torch.nn import functional as F
from typer.testing import CliRunner

import fxprec
from fxprec import cli
from fxprec.diagnosis.choose import Choice, Trial
from fxprec.errors import ConfigError

SIMULATED = {"recipe": "hfp8", "storage": "simulate", "lowering": "eager"}


def choice(*trials: Trial, tolerance: float = 0.01, higher: bool = False) -> Choice:
    return Choice({"recipe": "fp8"}, tolerance, higher, Trial(None, (1.0, 1.0)), trials)


def test_the_most_that_is_held_low_at_an_acceptable_drop_is_chosen() -> None:
    found = choice(
        Trial(0.3, (1.0, 1.004), 0.3),
        Trial(0.6, (1.02, 1.0), 0.55, saved_bytes=3 << 19),
        Trial(0.8, (1.03, 1.0), 0.7),
        tolerance=0.012,
    )
    assert found.chosen is found.trials[1], "worse by 0.01; the next by 0.015"
    assert found.recommended == {"recipe": "fp8", "low_ratio": 0.6}
    assert "0.6        0.55      0         1.5 MiB     1.01 ± 0.014          +0.01  <- chosen" in str(found)


def test_promotions_decide_between_ratios_that_are_accepted() -> None:
    found = choice(Trial(0.5, (1.0,), 0.5), Trial(0.9, (1.0,), 0.4, promoted=7))
    assert found.chosen is found.trials[0], "0.9 held less low over its training"


def test_a_higher_score_is_better_where_that_is_said() -> None:
    trial = Trial(0.5, (1.2,), 0.5)
    assert choice(trial).chosen is None
    assert choice(trial, higher=True).chosen is trial


def test_a_run_that_diverged_is_no_choice_and_is_counted() -> None:
    found = choice(Trial(0.5, (1.0, math.nan), 0.5))
    assert found.chosen is None
    assert "1 of 2 diverged" in str(found)
    assert str(found).endswith("no low ratio is within 0.01 of 1: allow a larger tolerance, or choose another recipe")
    with pytest.raises(ConfigError, match=r"no low ratio is within 0\.01 of 1: allow a larger tolerance"):
        _ = found.recommended


def test_a_reference_that_diverged_is_the_reason(tmp_path: Path) -> None:
    found = Choice({}, 0.01, False, Trial(None, (1.0, math.inf)), (Trial(0.5, (1.0, -math.inf)),))
    assert str(found).endswith(
        "without fxprec 1 of 2 runs diverged, so there is no score to compare with: mend train first"
    )
    with pytest.raises(ConfigError, match="without fxprec 1 of 2 runs diverged"):
        _ = found.recommended
    found.save(tmp_path / "trials.json")
    saved = json.loads((tmp_path / "trials.json").read_text(), parse_constant=pytest.fail)
    assert (saved["reference"]["scores"], saved["trials"][0]["drop"]) == ([1.0, "inf"], "nan")


def test_a_smaller_ratio_that_was_not_accepted_is_told() -> None:
    found = choice(Trial(0.3, (1.5,), 0.3), Trial(0.6, (1.0,), 0.6))
    assert "A smaller ratio was not accepted: the seeds differ by more than the ratios" in str(found)


def train(backend: Any, seed: int) -> float:
    """How far a gradient of `Loud`, whose activations leave HFP8's range, lies from float32's."""
    model = Loud()
    x = torch.randn(64, 16)
    compiled = torch.compile(model, backend=backend)
    for _ in range(4):
        model.zero_grad()
        compiled(x).square().mean().backward()
    found = next(model.parameters()).grad.clone()
    model.zero_grad()
    model(x).square().mean().backward()
    wanted = next(model.parameters()).grad
    return float(F.mse_loss(found, wanted).sqrt() / wanted.square().mean().sqrt())


def test_it_trains_at_each_ratio_and_takes_the_largest_that_does_no_harm(tmp_path: Path) -> None:
    lines: list[str] = []
    found = fxprec.choose(train, options=SIMULATED, ratios=(1.0, 0.0), seeds=1, tolerance=0.05, tell=lines.append)
    assert found.reference.score < 1e-5, "float32 against itself"
    assert [t.low_ratio for t in found.trials] == [0.0, 1.0]
    high, low = found.trials
    assert (high.mean_demoted_ratio, high.promoted) == (0, 0)
    assert 0.3 < low.mean_demoted_ratio < 1, "promotions took some of it"
    assert low.promoted > 0
    assert low.saved_bytes == high.saved_bytes, "a simulation saves float32"
    assert found.drop(high) < 0.05 < found.drop(low)
    assert found.recommended == SIMULATED | {"low_ratio": 0.0}
    assert len(lines) == 3
    found.save(tmp_path / "choice.json")
    saved = json.loads((tmp_path / "choice.json").read_text())
    assert saved["low_ratio"] == 0.0
    assert [t["accepted"] for t in saved["trials"]] == [True, False]


def test_bytes_saved_fall_with_the_ratio() -> None:
    def step(backend: Any, seed: int) -> float:
        layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
        torch.compile(layers, backend=backend)(torch.randn(64, 16)).sum().backward()
        return 0.0

    options = {"recipe": "fp8", "lowering": "eager"}
    high, low = fxprec.choose(step, options=options, ratios=(0.0, 1.0), seeds=1).trials
    stored = 64 * (16 + 32)  # the input and what the first layer computes; backward recomputes GELU's result
    assert (low.saved_bytes, high.saved_bytes) == (stored, stored * 2)


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ({"low_ratio": 0.5}, {}, "low_ratio=0.5 decides what choose is to find; leave it out"),
        ({"recipe": "fp9"}, {}, "unknown recipe 'fp9'"),
        ({}, {"ratios": ()}, "ratios is empty; give low ratios to try"),
        ({}, {"ratios": (1.5,)}, "ratios is 1.5, out of range"),
        ({}, {"seeds": 0}, "seeds is 0; give it an int of at least 1"),
    ],
)
def test_what_cannot_be_tried_is_refused(options: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fxprec.choose(lambda backend, seed: 0.0, options=options, **arguments)


def test_a_function_that_trains_nothing_or_returns_no_number_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train compiled no training step .* torch.compile\(model, backend=backend\)"
    ):
        fxprec.choose(lambda backend, seed: 0.0, ratios=(1.0,), seeds=1)
    with pytest.raises(ConfigError, match="train returned NoneType; let it return one number"):
        fxprec.choose(lambda backend, seed: None, ratios=(1.0,), seeds=1)
    with pytest.raises(ConfigError, match="options is 3; give it a dict such as"):
        fxprec.choose(lambda backend, seed: 0.0, options=3)
    with pytest.raises(ConfigError, match=r"train is int; give a function train\(backend, seed\) that returns a score"):
        fxprec.choose(3)


def test_the_command_prints_the_trials(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("def make(backend, seed):\n    return 0.5 if backend == 'eager' else 0.25\n")
    target = f"{tmp_path / 'run.py'}:make"
    found = CliRunner().invoke(
        cli.app, ["choose", target, "--ratios", "0", "--seeds", "1", "--out", str(tmp_path / "o")]
    )
    assert found.exit_code == 0, found.output
    assert "0          0         0                     0.25 ± 0              -0.25  <- chosen" in found.output
    assert json.loads((tmp_path / "o").read_text())["low_ratio"] == 0
