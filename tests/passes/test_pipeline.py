"""Two lists of passes, one for each semantics: the storage picks the list, and no pass asks for the storage."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import compiled, eager_backend
from torch import nn

from fxprec.config import Config, Settings
from fxprec.errors import PassError
from fxprec.passes import pipeline
from fxprec.passes.base import Work
from fxprec.passes.weigh_gemms import WeighGemms


@pytest.mark.parametrize("storage", ["native", "packed", "simulate"])
def test_the_passes_of_a_storage_ran_in_training_and_in_evaluation(storage: str) -> None:
    backend = eager_backend("fp8", storage=storage)
    call = compiled(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), backend)
    call(torch.randn(4, 8)).sum().backward()
    with torch.no_grad():
        call(torch.randn(4, 8))
    wanted = pipeline.SIMULATION if storage == "simulate" else pipeline.PIPELINE
    ran = [[step.name for step in report.passes] for report in backend.compile_reports]
    assert ran == [[step.name for step in wanted]] * 2


def test_calibration_counts_the_tensors_that_the_pipeline_counts() -> None:
    """Its passes up to the groups are the pipeline's, options and all."""
    for storage in ("native", "simulate"):
        settings = Settings.of(Config(recipe="fp8", storage=storage))
        passes, measuring = pipeline.pipeline_for(settings), pipeline.calibration_for(settings)
        end = [step.name for step in passes].index("group-tensors") + 1
        assert measuring[:end] == passes[:end]
        assert measuring[end].name == "insert-observers"


@pytest.mark.parametrize("step", [*pipeline.PIPELINE, *pipeline.SIMULATION], ids=lambda step: step.name)
def test_no_pass_asks_for_the_storage(step: object) -> None:
    source = inspect.getsource(inspect.getmodule(type(step)))
    assert "is_simulated" not in source
    assert '"simulate"' not in source


def test_a_fault_in_a_pass_names_the_pass_and_how_to_report_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: WeighGemms, work: Work) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(WeighGemms, "apply", fail)
    words = r"pass weigh-gemms failed with IndexError: list index out of range \(test_pipeline.py:\d+\).*`fxprec env`"
    with pytest.raises(PassError, match=words):
        compiled(nn.Linear(4, 4), eager_backend("fp8"))(torch.ones(2, 4))
    assert "Traceback" in caplog.text
