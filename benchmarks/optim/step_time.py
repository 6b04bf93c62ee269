"""Step time, loss and bytes of fxprec.optim against torch-optimi and torch.optim (pip install torch-optimi).

    python -m benchmarks.optim.step_time

The character transformer of 6 layers, AdamW, bf16 weights; steps are interleaved, medians are shown. Then 60 steps of
training on the same data, and the bytes that weights and state take.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.nn import functional

import fxprec
from benchmarks import machine
from examples.models.char_transformer import six_layer
from fxprec.demo.data import VOCAB, load_text

BETAS, LR, DECAY, CONTEXT = (0.9, 0.99), 1e-3, 1e-2, 32


def makers() -> dict[str, Any]:
    import optimi

    options = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
    return {
        "fxprec kahan": lambda p: fxprec.optim.AdamW(p, update="kahan", **options),
        "fxprec stochastic": lambda p: fxprec.optim.AdamW(p, update="stochastic", **options),
        "fxprec nearest": lambda p: fxprec.optim.AdamW(p, update="nearest", **options),
        "optimi kahan": lambda p: optimi.AdamW(p, kahan_sum=True, **options),
        "optimi kahan foreach": lambda p: optimi.AdamW(p, kahan_sum=True, foreach=True, **options),
        "torch bf16": lambda p: torch.optim.AdamW(p, **options),
    }


def step_times(rounds: int = 8) -> dict[str, float]:
    """Median seconds of ``opt.step()`` over interleaved rounds."""
    optimizers, times = {}, {}
    for name, make in makers().items():
        torch.manual_seed(0)
        model = six_layer(VOCAB, CONTEXT).bfloat16()
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        optimizers[name], times[name] = make(model.parameters()), []
    for i in range(rounds + 3):
        for name, opt in optimizers.items():
            start = time.perf_counter()
            opt.step()
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def curve(make: Any, dtype: torch.dtype, steps: int = 60) -> list[float]:
    """Losses of the same model on the same data."""
    torch.manual_seed(0)
    model = six_layer(VOCAB, CONTEXT).to(dtype)
    opt, text, losses = make(model.parameters()), load_text().train, []
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (16, 1), generator=torch.Generator().manual_seed(step))
        codes = text[starts + torch.arange(CONTEXT + 1)]
        loss = functional.cross_entropy(model(codes[:, :-1]).float().flatten(0, 1), codes[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def bytes_of(opt: torch.optim.Optimizer, copies: int = 0) -> int:
    """Weights and their state; ``copies`` more bytes a weight for a 16-bit copy. Step counters left out."""
    weights = [p for group in opt.param_groups for p in group["params"]]
    state = [t for s in opt.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim() > 0]
    return sum(t.numel() * t.element_size() for t in [*weights, *state]) + copies * sum(p.numel() for p in weights)


def memory() -> dict[str, Any]:
    """AdamW's bytes for one model, all sides measured after a step."""
    found = {}
    for name, dtype, make, copies in (
        ("fxprec kahan bf16", torch.bfloat16, makers()["fxprec kahan"], 0),
        ("torch fp32", torch.float32, makers()["torch bf16"], 0),
        ("mixed precision: torch fp32 and a bf16 copy", torch.float32, makers()["torch bf16"], 2),
    ):
        model = six_layer(VOCAB, CONTEXT).to(dtype)
        opt = make(model.parameters())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
        found[name] = bytes_of(opt, copies)
    ours, full, mixed = found.values()
    return {"bytes": found, "saved against fp32": 1 - ours / full, "saved against mixed": 1 - ours / mixed}


def main() -> None:
    torch.set_num_threads(2)
    times = step_times()
    ratio = times["fxprec kahan"] / min(times["optimi kahan"], times["optimi kahan foreach"])
    print({k: f"{1e3 * v:.2f} ms" for k, v in times.items()}, f"ratio {ratio:.2f}")
    bytes_ = memory()
    print(bytes_)
    tail = {}
    for name in ("fxprec kahan", "optimi kahan foreach"):
        losses = curve(makers()[name], torch.bfloat16)
        tail[name] = {"last_20": statistics.mean(losses[-20:]), "mean": statistics.mean(losses), "curve": losses[::10]}
        print(name, {k: v for k, v in tail[name].items() if k != "curve"})
    rows = {"step_seconds": times, "ratio_to_best_optimi": ratio, "memory": bytes_, "losses": tail}
    print("wrote", machine.save("optim-step-time", rows))


if __name__ == "__main__":
    main()
