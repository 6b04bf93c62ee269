"""Lightning's Trainer: compile, 20 steps, save, resume bit for bit, evaluate, statistics in its logger."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxprec
from tests.integrations.small import OPTIONS, Loud, batch

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice

from fxprec.integrations.lightning import FxprecCallback

STEPS, SAVED = 20, 10


class Regression(lightning.LightningModule):
    """Calls ``self(x)``, as most do; or ``self.inner(x)``."""

    def __init__(self, *, calls_inner: bool = False) -> None:
        super().__init__()
        self.inner, self.calls_inner = Loud(), calls_inner
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def _loss(self, x: Tensor) -> Tensor:
        return (self.inner(x) if self.calls_inner else self(x)).square().mean()

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss = self._loss(x)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, x: Tensor, index: int) -> None:
        self.log("validation", self._loss(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


def batches() -> torch.utils.data.DataLoader:
    """An epoch until the checkpoint: this loader has no position to resume at."""
    return torch.utils.data.DataLoader([batch(step) for step in range(SAVED)], batch_size=None)


def run(
    folder: Path, model: Any, callback: FxprecCallback, resume: Path | None = None, steps: int = STEPS, **options: Any
) -> Any:
    torch.compiler.reset()
    saving = lightning.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=lightning.loggers.CSVLogger(folder),
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback, saving],
        **{"log_every_n_steps": 5} | options,
    )  # fmt: skip
    trainer.fit(model, batches(), batches(), ckpt_path=resume)
    return trainer


def test_training_resumes_bit_for_bit_and_logs(tmp_path: Path) -> None:
    whole, callback = Regression(), FxprecCallback(OPTIONS)
    trainer = run(tmp_path, whole, callback)
    plan = fxprec.backend_of(whole).plans[0]
    assert plan.promoted
    assert plan.gemms[0].module == "inner.a"
    (metrics,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
    with metrics.open() as file:
        logged = [float(line["fxprec/promoted"]) for line in csv.DictReader(file) if line["fxprec/promoted"]]
    assert logged == [len(plan.promoted)] * (STEPS // 5)

    resumed = Regression()
    again = run(tmp_path, resumed, FxprecCallback(OPTIONS), tmp_path / f"step={SAVED}.ckpt")
    assert torch.equal(torch.stack(resumed.losses), torch.stack(whole.losses[SAVED:]))
    assert fxprec.backend_of(resumed).plans == (plan,)
    assert again.callback_metrics["validation"] == trainer.callback_metrics["validation"]


def test_a_step_that_calls_something_else_is_told(tmp_path: Path) -> None:
    with pytest.warns(fxprec.FxprecWarning, match=r"Regression.training_step ran nothing .* self\(\.\.\.\); .* part="):
        run(tmp_path, Regression(calls_inner=True), FxprecCallback(OPTIONS), steps=1)


def test_the_part_that_it_calls_is_compiled(tmp_path: Path) -> None:
    model = Regression(calls_inner=True)
    run(tmp_path, model, FxprecCallback(OPTIONS, part="inner"), steps=1)
    assert len(fxprec.backend_of(model.inner).plans) == 1


def test_a_step_of_several_batches_is_logged_once_and_nothing_where_logging_is_off(tmp_path: Path) -> None:
    run(
        tmp_path / "two", Regression(), FxprecCallback(OPTIONS), steps=4, log_every_n_steps=1, accumulate_grad_batches=2
    )
    (metrics,) = tmp_path.glob("two/lightning_logs/version_0/metrics.csv")
    with metrics.open() as file:
        assert [line["step"] for line in csv.DictReader(file) if line["fxprec/promoted"]] == ["1", "2", "3", "4"]
    run(tmp_path / "off", Regression(), FxprecCallback(OPTIONS), steps=2, log_every_n_steps=0)
    assert not list(tmp_path.glob("off/lightning_logs/version_0/metrics.csv"))
