"""Statistics in one call: a CSV file, TensorBoard, W&B, Lightning's loggers; and which parts of a model have any."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxprec
from fxprec.integrations import backends_in, compile_layers, log_statistics, summary
from fxprec.runtime.stats import StatsQueue
from tests.integrations.small import OPTIONS, Loud, batch


@pytest.fixture(scope="module")
def model() -> nn.Module:
    model = Loud()
    model.compile(backend="fxprec", options=OPTIONS)
    for step in range(3):
        model(batch(step)).square().mean().backward()
    return model


class Board:
    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen[name] = value, step


class WandbRun:
    def log(self, values: dict[str, float]) -> None:
        self.seen = values


class LightningLogger:
    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.seen = {**values, "step": step}


def test_a_summary_counts_promotions_and_has_the_worst_ratios(model: nn.Module) -> None:
    backend = fxprec.backend_of(model)
    found = summary(model)
    assert found["fxprec/promoted"] == len(backend.plans[0].promoted) > 0
    assert found["fxprec/saved_low_share"] == backend.saved_low_share == 0, "a simulation saves float32"
    assert found["fxprec/mean_demoted_ratio"] == backend.mean_demoted_ratio < backend.plans[0].achieved_low_ratio
    assert found["fxprec/underflow_ratio"] == max(row["underflow_ratio"] or 0 for row in backend.stats())


def test_a_file_gets_a_line_a_cast_and_one_header(model: nn.Module, tmp_path: Path) -> None:
    for step in (1, 2):
        log_statistics(model, tmp_path / "new" / "statistics.csv", step)
    with (tmp_path / "new" / "statistics.csv").open() as file:
        lines = list(csv.DictReader(file))
    rows = fxprec.backend_of(model).stats()
    assert [line["step"] for line in lines] == ["1"] * len(rows) + ["2"] * len(rows)
    assert [(line["tensor"], float(line["amax"])) for line in lines[: len(rows)]] == [
        (row["tensor"], row["amax"]) for row in rows
    ]


def test_tensorboard_gets_series_by_tensor_where_asked(model: nn.Module) -> None:
    few, all_of_them = Board(), Board()
    log_statistics(model, few, 5)
    log_statistics(model, all_of_them, 5, every_tensor=True)
    assert few.seen == {name: (value, 5) for name, value in summary(model).items()}
    amax = next(
        row["amax"] for row in fxprec.backend_of(model).stats() if (row["tensor"], row["kind"]) == ("relu", "output")
    )
    assert all_of_them.seen["fxprec/amax/graph0/relu/output"] == (amax, 5)


def test_other_loggers_get_one_dict(model: nn.Module) -> None:
    run, logger = WandbRun(), LightningLogger()
    log_statistics(model, run, 5)
    log_statistics(model, logger, 5)
    assert run.seen == {**summary(model), "fxprec/step": 5}
    assert logger.seen == {**summary(model), "step": 5}


def test_tensorboards_own_reader_finds_what_its_writer_got(model: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        log_statistics(model, writer, 5)
    read = EventAccumulator(str(tmp_path)).Reload()
    found = {name: (read.Scalars(name)[0].value, read.Scalars(name)[0].step) for name in read.Tags()["scalars"]}
    assert found == {name: (pytest.approx(value), 5) for name, value in summary(model).items()}


def test_wandbs_run_offline_has_the_numbers(model: nn.Module, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off")) as run:
        log_statistics(model, run, 5)
        found = dict(run.summary)
    assert {name: found[name] for name in summary(model)} == summary(model)


def test_anything_else_is_one_line_with_the_way_out(model: nn.Module) -> None:
    with pytest.raises(fxprec.ConfigError, match=r"to=int takes no statistics; give .*SummaryWriter.*CSV file"):
        log_statistics(model, 3, 1)


def test_nothing_is_waited_for(model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits = []
    take, peek = StatsQueue.take, StatsQueue.peek
    monkeypatch.setattr(StatsQueue, "take", lambda self, *, keep, wait: (waits.append(wait), take(self))[1])
    monkeypatch.setattr(StatsQueue, "peek", lambda self, *, wait: (waits.append(wait), peek(self))[1])
    log_statistics(model, tmp_path / "statistics.csv", 1)
    summary(model)
    assert waits == [False] * 4


def test_parts_of_a_model_are_found_by_name_each_backend_once() -> None:
    shared = fxprec.Backend(fxprec.Config(**OPTIONS))
    model: Any = nn.Sequential(*(Loud() for _ in range(3)))
    for part in model[:2]:
        part.compile(backend=shared)
    model[2] = torch.compile(model[2], backend="fxprec", options=OPTIONS)
    found = backends_in(model)
    assert list(found) == ["0", "2"]
    assert found["0"] is shared
    assert backends_in(shared) == {"": shared}
    with pytest.raises(fxprec.ConfigError, match=r"fxprec compiled no part of this Linear; call model\.compile"):
        backends_in(nn.Linear(1, 1))


def test_layers_are_compiled_by_class_or_name_and_a_wrong_name_lists_the_right_ones() -> None:
    model = nn.Sequential(Loud(), Loud())
    assert compile_layers(model, "Loud", OPTIONS) == 2
    before = backends_in(model)
    assert compile_layers(model, Loud, OPTIONS) == 2, "again: they keep the backends they have"
    assert list(before) == ["0", "1"]
    assert backends_in(model) == before
    optimizer = fxprec.optim.SGD(model.parameters())
    assert compile_layers(model, Loud, {**OPTIONS, "optimizer": optimizer}) == 2, "an option beside the config's"
    with pytest.raises(fxprec.ConfigError, match="no module of class 'Block' to compile; this model has Linear, Loud"):
        compile_layers(model, "Block")


@pytest.mark.parametrize(
    ("module", "package"),
    [("huggingface", "transformers"), ("lightning", "lightning"), ("torchtitan", "torchtitan")],
)
def test_a_missing_package_is_one_line_with_the_way_out(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"fxprec.integrations.{module}", raising=False)
    with pytest.raises(fxprec.FxprecError, match=rf"fxprec\.integrations\.{module} needs .*pip install {package}"):
        importlib.import_module(f"fxprec.integrations.{module}")
