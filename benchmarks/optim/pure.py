"""Bytes a training step holds, and its loss: fp32, mixed precision, and recipe ``bf16-pure`` with Kahan summation.

    python -m benchmarks.optim.pure

A character transformer of 6 layers, AdamW, the same data for all. Bytes of weights, gradients and optimizer state are
those of the tensors themselves; "saved" is what autograd keeps for backward, each storage once.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxprec
from benchmarks import machine
from examples.models.char_transformer import six_layer
from fxprec.demo.data import VOCAB, load_text

CONTEXT, BATCH = 64, 16
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 1e-2}
SIDES: dict[str, tuple[torch.dtype, str | None, Any]] = {
    "fp32": (torch.float32, None, lambda p: torch.optim.AdamW(p, **OPTIONS)),
    "bf16, weights fp32": (torch.float32, "bf16", lambda p: torch.optim.AdamW(p, **OPTIONS)),
    "bf16-pure, kahan": (torch.bfloat16, "bf16-pure", lambda p: fxprec.optim.AdamW(p, update="kahan", **OPTIONS)),
    "bf16-pure, stochastic": (
        torch.bfloat16,
        "bf16-pure",
        lambda p: fxprec.optim.AdamW(p, update="stochastic", **OPTIONS),
    ),
}


def bytes_of(tensors: Any) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def train(dtype: torch.dtype, recipe: str | None, make: Any, steps: int) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = six_layer(VOCAB, CONTEXT).to(dtype)
    backend = "inductor" if recipe is None else fxprec.Backend(fxprec.Config(recipe=recipe))
    function, optimizer, text = torch.compile(model, backend=backend), make(model.parameters()), load_text().train
    losses, start, saved = [], time.perf_counter(), []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        codes = text[starts + torch.arange(CONTEXT + 1)]
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            logits = function(codes[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), codes[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
        losses.append(loss.item())
    weights = list(model.parameters())
    own = {p.untyped_storage().data_ptr() for p in weights}
    kept = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
    held = {
        "weights": bytes_of(weights),
        "gradients": bytes_of(p.grad for p in weights),
        "state": bytes_of(state),
        "saved": bytes_of(kept),
    }
    float32 = [t for t in [*weights, *state, *kept] if t.dtype == torch.float32]
    return {
        "loss_last_20": statistics.fmean(losses[-20:]),
        "bytes": held | {"total": sum(held.values())},
        "float32_bytes": bytes_of(float32),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = {}
    for name, (dtype, recipe, make) in SIDES.items():
        rows[name] = train(dtype, recipe, make, args.steps)
        rows[name]["total_ratio"] = rows[name]["bytes"]["total"] / rows["fp32"]["bytes"]["total"]
        print(name, rows[name], flush=True)
    print("wrote", machine.save("optim-bf16-pure", {"arguments": vars(args), "sides": rows}))


if __name__ == "__main__":
    main()
