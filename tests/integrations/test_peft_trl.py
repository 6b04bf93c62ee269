"""PEFT's LoRA and TRL's SFTTrainer on top of the callback: 20 steps, save, resume bit for bit, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # their own

from fxprec.integrations.huggingface import FxprecCallback
from tests.integrations.test_huggingface import OPTIONS, SAVED, STEPS, Tokens, llama

ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1, "per_device_train_batch_size": 4, "report_to": "none",
    "learning_rate": 1e-2, "bf16": True, "gradient_checkpointing": True, "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip


def lora(folder: Path) -> Any:
    import transformers

    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    args = transformers.TrainingArguments(str(folder), **ARGUMENTS)
    callbacks = [FxprecCallback(OPTIONS)]
    return transformers.Trainer(model, args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)


def sft(folder: Path) -> Any:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({c: i for i, c in enumerate("_$ abcdefghijklmnopqrstuvwxyz")}, unk_token="_"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="_", eos_token="$", unk_token="_")
    texts = ["the same words"[i % 5 :][:9] for i in range(32)]  # of one length: one graph (docs/limits.md)
    data = datasets.Dataset.from_dict({"text": texts})
    args = trl.SFTConfig(str(folder), max_length=9, **ARGUMENTS)
    return trl.SFTTrainer(
        llama(), args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer,
        callbacks=[FxprecCallback(OPTIONS)],
    )  # fmt: skip


@pytest.mark.parametrize("make", [lora, sft])
def test_training_resumes_bit_for_bit(make: Any, tmp_path: Path) -> None:
    logs, parameters = [], []
    for resume in (None, str(tmp_path / f"checkpoint-{SAVED}")):
        torch.compiler.reset()
        torch.manual_seed(0)
        trainer = make(tmp_path)
        trainer.train(resume_from_checkpoint=resume)
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        logs[-1].append(trainer.evaluate()["eval_loss"])
        parameters.append([p.detach().clone() for p in trainer.model.parameters()])
    assert logs[0] == logs[1]
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))
