"""Train a LightningModule with 8-bit activations, stop, and resume from Lightning's own checkpoint.

python examples/lightning_digits.py    needs lightning and scikit-learn; --small for a quick look
"""

import sys
import tempfile

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fxprec.demo.data import load_digits
from fxprec.demo.models import SmallCNN
from fxprec.integrations.lightning import FxprecCallback


class Digits(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cnn = SmallCNN(width=width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.cnn(images)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(epochs: int, folder: str, small: bool, resume: str | None = None) -> lightning.Trainer:
    torch.compiler.reset()
    lightning.seed_everything(0, verbose=False)
    data = load_digits()
    batches = DataLoader(TensorDataset(data.train_images, data.train_labels), 256 if small else 64, drop_last=True)
    held_out = DataLoader(TensorDataset(data.test_images, data.test_labels), len(data.test_labels))

    # The one changed line: it compiles the module, and keeps the backend's state in Lightning's checkpoints.
    callback = FxprecCallback({"recipe": "fp8", "lowering": "eager" if small else "auto"})

    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=folder, callbacks=[callback], logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Digits(width=4 if small else 16), batches, held_out, ckpt_path=resume)
    return trainer


def main(small: bool = False) -> bool:
    half = 1 if small else 5
    with tempfile.TemporaryDirectory() as folder:
        whole = train(2 * half, f"{folder}/whole", small)
        first = train(half, f"{folder}/first", small)
        again = train(2 * half, f"{folder}/again", small, resume=first.checkpoint_callback.best_model_path)
    for name, trainer in (("whole", whole), ("first half", first), ("resumed", again)):
        accuracy = trainer.callback_metrics["accuracy"]
        print(f"{name:10}: {trainer.global_step} steps, test accuracy {accuracy:.2%}")
    pairs = zip(whole.lightning_module.parameters(), again.lightning_module.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print("resumed training has the same parameters:", same)
    return same


if __name__ == "__main__":
    main("--small" in sys.argv)
