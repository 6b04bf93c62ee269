"""Hugging Face's Trainer: compile, 20 steps, save, resume bit for bit, evaluate; in bf16 with checkpointing."""

from __future__ import annotations

import csv
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fxprec
from fxprec.integrations.statistics import COLUMNS
from tests.aps.aps_ranks import run_ranks
from tests.integrations.small import Loud

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # their own deprecations

from fxprec.integrations.huggingface import FxprecCallback

OPTIONS: dict[str, Any] = {
    "recipe": "hfp8",
    "low_ratio": 0.8,
    "storage": "simulate",
    "lowering": "eager",
}
STEPS, SAVED = 20, 10


class Tokens(torch.utils.data.Dataset):
    """32 windows of 9 tokens that count upwards."""

    def __init__(self) -> None:
        starts = torch.randint(0, 30, (32, 1), generator=torch.Generator().manual_seed(0))
        self.windows = (starts + torch.arange(9)) % 30

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[i], "labels": self.windows[i]}


def llama() -> Any:
    """One layer over embeddings that overflow 8 bits, so that there is a promotion to save."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=30, max_position_embeddings=9, bos_token_id=0, eos_token_id=0, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data *= 3000
    return model


def make_trainer(folder: Path, callback: Any, **changes: Any) -> Any:
    model = llama()
    args = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=SAVED, logging_steps=1, per_device_train_batch_size=4,
        per_device_eval_batch_size=4, learning_rate=1e-2, report_to="none", disable_tqdm=True, use_cpu=True,
        bf16=True, gradient_checkpointing=True, **changes,
    )  # fmt: skip
    return transformers.Trainer(model, args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=[callback])


@dataclass
class Run:
    callback: FxprecCallback
    log: list[dict[str, float]]
    parameters: list[Tensor]
    evaluated: float

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.log if "loss" in entry]


def train(folder: Path, resume: str | None = None, **changes: Any) -> Run:
    torch.compiler.reset()
    callback = FxprecCallback(OPTIONS, log_to=folder / "statistics.csv")
    trainer = make_trainer(folder, callback, **changes)
    trainer.train(resume_from_checkpoint=resume)
    parameters = [p.detach().clone() for p in trainer.model.parameters()]
    return Run(callback, trainer.state.log_history, parameters, trainer.evaluate()["eval_loss"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Run:
    return train(folder)


def test_training_compiles_one_graph_whose_layers_have_their_own_names(whole: Run) -> None:
    (backend,) = whole.callback.backends.values()
    (plan,) = backend.plans
    assert {gemm.module for gemm in plan.gemms} >= {"model.layers.0.mlp.up_proj", "lm_head"}
    assert plan.promoted, "the state has something to remember"
    assert whole.losses[-1] < whole.losses[1], "the first has embeddings that overflow; simulated rounding reaches it"


def test_a_resumed_training_goes_on_bit_for_bit(whole: Run, folder: Path) -> None:
    resumed = train(folder, str(folder / f"checkpoint-{SAVED}"), restore_callback_states_from_checkpoint=True)
    assert resumed.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters, whole.parameters, strict=True))
    assert resumed.evaluated == whole.evaluated
    mine, theirs = (run.callback.backends[""] for run in (resumed, whole))
    assert mine.plans == theirs.plans
    assert not [event for event in mine.events if event.kind == "promotion" and "overflow" in event.detail]


def test_numbers_are_in_the_trainers_log_and_a_line_a_cast_in_the_file(whole: Run, folder: Path) -> None:
    first = next(entry for entry in whole.log if "loss" in entry)
    assert first.keys() >= {"fxprec/promoted", "fxprec/overflow_ratio", "fxprec/underflow_ratio"}
    (backend,) = whole.callback.backends.values()
    with (folder / "statistics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert {int(line["step"]) for line in lines} == set(range(1, STEPS + 1))
    assert {line["tensor"] for line in lines} >= {site.tensor for site in backend.plans[0].promoted}


def test_a_checkpoint_without_the_state_is_told(whole: Run) -> None:
    model, callback = llama(), FxprecCallback(OPTIONS)
    state = transformers.TrainerState(global_step=7, stateful_callbacks={})
    with pytest.warns(fxprec.FxprecWarning, match="resumed at step 7 from a checkpoint without fxprec's state"):
        callback.on_train_begin(None, state, None, model=model)


def test_with_several_ranks_all_states_are_in_the_trainers_file(tmp_path: Path) -> None:
    callback = FxprecCallback(OPTIONS)
    trainer = make_trainer(tmp_path, callback)
    trainer.state.global_step = 3
    (tmp_path / "checkpoint-3").mkdir()

    class TwoRanks:
        world_size, should_save, output_dir = 2, True, str(tmp_path)

    callback.on_save(TwoRanks(), trainer.state, trainer.control)
    saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert json.loads(saved["stateful_callbacks"]["FxprecCallback"]["fxprec"]["ranks"])["state_of_rank"] == [0]


def test_the_trainers_own_switch_takes_no_backend_from_outside(tmp_path: Path) -> None:
    """The page says so; where this fails, accelerate has learnt it and the page should say that."""
    with pytest.raises(ValueError, match="'FXPREC' is not a valid DynamoBackend"):
        transformers.Trainer(llama(), transformers.TrainingArguments(str(tmp_path), torch_compile_backend="fxprec"))


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ |= {name: str(value) for name, value in variables.items()}
    warnings.simplefilter("ignore")
    with torch._dynamo.config.patch(optimize_ddp=False):
        first = train(Path(folder), ddp_backend="gloo")
        second = train(Path(folder), f"{folder}/checkpoint-{SAVED}", ddp_backend="gloo")
    same = all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))
    own, again = (run.callback.backends[""] for run in (first, second))
    return {"same": same and first.losses == second.losses, "states": own.state_dict() == again.state_dict()}


@pytest.mark.full
def test_two_ranks_resume_bit_for_bit_each_with_its_own_state(tmp_path: Path) -> None:
    assert run_ranks(2, on_two_ranks, str(tmp_path)) == [{"same": True, "states": True}] * 2
    saved = json.loads((tmp_path / f"checkpoint-{SAVED}" / "trainer_state.json").read_text())
    ranks = json.loads(saved["stateful_callbacks"]["FxprecCallback"]["fxprec"]["ranks"])
    assert ranks["state_of_rank"] == [0, 1], "ranks have other scales"


def test_a_jump_of_the_logged_loss_is_told():
    model = Loud()
    callback = FxprecCallback({"recipe": "fp8", "lowering": "eager"})
    callback.on_init_end(None, None, None, model=model)
    state = SimpleNamespace(log_history=[], is_world_process_zero=True, global_step=0)
    for loss in (*[1.0] * 12, 50.0, 1.0, 1.0):
        model(torch.randn(8, 8)).sum().backward()
        callback.on_log(None, state, None, logs={"loss": loss})
    events = callback.backends[""].events
    assert [event.step for event in events if event.kind == "loss-jump"] == [13]


def test_options_that_are_wrong_or_not_used_are_told() -> None:
    model = torch.nn.Linear(4, 4)
    model.compile(backend="fxprec", options={"recipe": "bf16"})
    callback = FxprecCallback({"recipe": "fp8"})
    with pytest.warns(fxprec.FxprecWarning, match=r"Linear is compiled already, with 'bf16', and .*fp8.* is not used"):
        callback.on_init_end(None, None, None, model=model)
    with pytest.raises(fxprec.ConfigError, match=r"options is 'fp8'; give a dict of fxprec.Config's fields"):
        FxprecCallback("fp8")
    with pytest.raises(fxprec.ConfigError, match=r"to=int takes no statistics; give TensorBoard's SummaryWriter"):
        FxprecCallback(log_to=5)
