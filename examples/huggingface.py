"""Train a Hugging Face causal language model with 8-bit activations: bf16, gradient checkpointing, save, resume.

python examples/huggingface.py    needs transformers and accelerate; --small for a quick look
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fxprec.demo.data import VOCAB, load_text
from fxprec.integrations.huggingface import FxprecCallback


class Windows(torch.utils.data.Dataset):
    """Characters of Python's own standard library, in windows."""

    def __init__(self, codes: torch.Tensor, length: int) -> None:
        self.windows = codes[: len(codes) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[i], "labels": self.windows[i]}


def train(folder: str, small: bool, resume: str | None = None) -> tuple[list[float], Trainer]:
    torch.compiler.reset()
    torch.manual_seed(0)
    length, width, layers, steps = (16, 16, 1, 8) if small else (128, 128, 4, 200)
    text = load_text(20_000 if small else 1_000_000)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    config = LlamaConfig(
        vocab_size=VOCAB, num_attention_heads=4, max_position_embeddings=length, bos_token_id=None, eos_token_id=None,
        **sizes,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        folder, max_steps=steps, save_steps=steps // 2, logging_steps=steps // 8, per_device_train_batch_size=8,
        learning_rate=2e-3, bf16=True, gradient_checkpointing=True, report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip

    # The one changed line: it compiles the model, and keeps the backend's state in the trainer's checkpoints.
    callback = FxprecCallback({"recipe": "fp8", "lowering": "eager" if small else "auto"})

    held_out = Windows(text.held_out[: 64 * length], length)
    windows = Windows(text.train, length)
    trainer = Trainer(model, arguments, train_dataset=windows, eval_dataset=held_out, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def main(small: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses, trainer = train(folder, small)
        held_out = trainer.evaluate()["eval_loss"]
        half = f"{folder}/checkpoint-{trainer.state.max_steps // 2}"
        again, resumed = train(folder, small, resume=half)
    print("loss:   ", " ".join(f"{loss:.3f}" for loss in losses), f"held out: {held_out:.3f}")
    print("resumed:", " ".join(f"{loss:.3f}" for loss in again))
    pairs = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
    print("resumed training has the same parameters:", all(torch.equal(a, b) for a, b in pairs))


if __name__ == "__main__":
    main("--small" in sys.argv)
