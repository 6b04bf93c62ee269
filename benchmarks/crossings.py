"""What crosses to backward by torch's min-cut and by our chooser: bytes saved, errors of gradients, seconds of planning.

    python -m benchmarks.crossings
    python -m benchmarks.crossings --only unet gru --recipes fp8

Each architecture is trained for two steps with the reference lowering, once by the pipeline without choose-crossings
and once by the whole. Seconds are of CPU, of all passes.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import machine
from benchmarks.architectures.own import OWN
from benchmarks.architectures.training import built, reference, relative_error
from fxprec import Backend, Config
from fxprec.passes import pipeline

PIPELINES = {
    "min-cut": tuple(step for step in pipeline.PIPELINE if step.name != "choose-crossings"),
    "chosen": pipeline.PIPELINE,
}


@dataclass(frozen=True)
class Side:
    """One training by one pipeline."""

    losses: list[float]
    gradients: dict[str, Tensor]
    saved: int
    passes_s: float


class Saved(saved_tensors_hooks):
    """Counts the bytes of storages that autograd keeps for backward, inputs included, parameters and buffers not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._keep, lambda x: x)
        self._own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
        self._kept: dict[int, Tensor] = {}  # held, lest another storage take the address

    def _keep(self, x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in self._own:
            self._kept[x.untyped_storage().data_ptr()] = x
        return x

    @property
    def bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self._kept.values())


def train(name: str, recipe: str, side: str) -> Side:
    """Take two steps; return the last one's gradients."""
    torch.compiler.reset()
    model, loss_of = built(OWN[name])
    backend = Backend(Config(recipe=recipe, lowering="eager", cpu="avx512+bf16"))
    losses, passes_s = [], 0.0
    run = pipeline.run

    def timed(*args: object, **options: object) -> object:
        nonlocal passes_s
        start = time.process_time()
        try:
            return run(*args, **options)  # type: ignore[arg-type]
        finally:
            passes_s += time.process_time() - start

    with mock.patch.object(pipeline, "PIPELINE", PIPELINES[side]), mock.patch.object(pipeline, "run", timed):
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            torch.manual_seed(1)
            model.zero_grad()
            saved = Saved(model)
            with saved:
                loss = loss_of(compiled)
            loss.backward()
            losses.append(float(loss.detach()))
    gradients = {
        n: (p.grad.to_dense() if p.grad.is_sparse else p.grad).double()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    return Side(losses, gradients, saved.bytes, passes_s)


def measure(name: str, recipe: str) -> dict[str, object]:
    """Return one row: what each saves, and its gradient's relative error to float32's, all in one vector."""
    cut, chosen = (train(name, recipe, side) for side in PIPELINES)
    exact = reference(OWN[name]).gradients[0]
    row: dict[str, object] = {
        "architecture": name,
        "recipe": recipe,
        "saved_by_min_cut": cut.saved,
        "saved_chosen": chosen.saved,
        "ratio": round(chosen.saved / max(cut.saved, 1), 4),
        "gradients_equal": all(torch.equal(cut.gradients[n], g) for n, g in chosen.gradients.items()),
        "errors": [round(relative_error(exact, side.gradients), 5) for side in (cut, chosen)],
        "losses_equal": cut.losses == chosen.losses,
        "passes_s": [round(cut.passes_s, 2), round(chosen.passes_s, 2)],
    }
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(OWN), default=list(OWN), metavar="NAME")
    parser.add_argument("--recipes", nargs="+", default=["fp8", "bf16"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = [measure(name, recipe) for name in args.only for recipe in args.recipes]
    print(f"written to {machine.save('crossings', rows).name}")


if __name__ == "__main__":
    main()
