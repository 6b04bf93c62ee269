"""How exact are optimizer states in few bits? Beside torchao's and bitsandbytes' (pip install torchao bitsandbytes).

    python -m benchmarks.optim.states maps        # maps for the second moment, one at a time
    python -m benchmarks.optim.states weights     # whole optimizers: weights on the same gradients, against float64
    python -m benchmarks.optim.states weights-4bit, training-4bit    # the same of states in 4 bits; training of 3 seeds
    python -m benchmarks.optim.states training    # whole optimizers: held-out loss of a byte-level transformer
    python -m benchmarks.optim.states bf16        # the same with bf16 weights
    python -m benchmarks.optim.states whole       # the same with bf16 weights, compiled in fp8, stepped in backward; 3 seeds
    python -m benchmarks.optim.states clipping    # the same, float32 states, clipped by this step's norm and the last's
    python -m benchmarks.optim.states summed      # the same, gradients of 16 backward passes summed before each step
    python -m benchmarks.optim.states muon        # the same, Muon for the layers' matrices, its average held in fewer bits
    python -m benchmarks.optim.states times       # whole optimizers: a step of 4.9 million weights

Gradients of the first two are those of a small byte-level transformer that float64 AdamW trains. An error is the norm
of the difference in weights over the norm of what float64 AdamW moved them by.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fxprec
from benchmarks import machine
from fxprec.demo.models import CharTransformer
from fxprec.demo.tasks import cross_entropy, text_task
from fxprec.numerics.formats import parse
from fxprec.runtime.optim import states
from fxprec.runtime.optim.rounding import dither_bits, random_bits

_COMPILE = torch.compile  # `main` has torchao's steps run uncompiled
RATE, STEPS, CONTEXT, BATCH = 2e-3, 1000, 64, 8


def _ao(params: Any, **options: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **options)


def _ao4(params: Any, **options: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW4bit

    return AdamW4bit(params, **options)


def _bnb(params: Any, **options: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, **options)  # type: ignore[no-any-return]


def _ours(params: Any, held: Any, **options: Any) -> torch.optim.Optimizer:
    return fxprec.optim.AdamW(params, update="nearest", states=held, **options)


SIDES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch.optim float32": torch.optim.AdamW,
    "fxprec bf16": partial(_ours, held="bf16"),
    "fxprec 8bit": partial(_ours, held="8bit"),
    "torchao 8bit": _ao,
    "bitsandbytes 8bit": _bnb,
}


CLIPPED = {
    f"fxprec float32, clipped, norm={norm!r}": partial(_ours, held="float32", max_norm=0.5, norm=norm)
    for norm in ("exact", "last")
}
FEWER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fxprec float32": partial(_ours, held="float32"),
    "fxprec 8bit": partial(_ours, held="8bit"),
    "fxprec 4bit": partial(_ours, held="4bit"),
    "torchao 4bit": _ao4,
}
NEAREST = "sums in bf16, rounded to nearest"
SUMMED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sums in float32": partial(_ours, held="float32"),
    NEAREST: partial(_ours, held="float32"),
    "fxprec, gradients='bf16'": partial(_ours, held="float32", gradients="bf16"),
}


class WithMuon:
    """Muon steps the matrices of `CharTransformer`'s layers, AdamW the rest, as one optimizer."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, make_muon: Any, make_adamw: Any) -> None:
        of_layers, others = [], []
        for p in params:
            (of_layers if p.dim() == 2 and len(p) not in (256, CONTEXT) else others).append(p)
        self.parts = make_muon(of_layers, lr=lr), make_adamw(others, lr=lr)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.defaults: dict[str, Any] = {}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def _muon(held: Any, **options: Any) -> Callable[..., Any]:
    make = partial(fxprec.optim.Muon, states=held, adjust_lr_fn="match_rms_adamw", **options)
    return partial(WithMuon, make_muon=make, make_adamw=partial(_ours, held="float32"))


MUON: dict[str, Callable[..., Any]] = {
    "torch.optim AdamW": torch.optim.AdamW,
    "torch.optim Muon": partial(
        WithMuon,
        make_muon=partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
        make_adamw=torch.optim.AdamW,
    ),
    **{f"fxprec Muon {held}": _muon(held, update="nearest") for held in ("float32", "bf16", "8bit", "4bit")},
}
WHOLE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    f"fxprec fp8, bf16 weights, {held}, stepped in backward": partial(fxprec.optim.AdamW, states=held)
    for held in ("8bit", "4bit")
}
BF16_WEIGHTS = {"fxprec 8bit, bf16 weights, stochastic": partial(fxprec.optim.AdamW, states="8bit")}


def rate_at(step: int, steps: int) -> float:
    return RATE * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate


def gradients(steps: int, width: int) -> Iterator[tuple[int, list[nn.Parameter], list[Tensor]]]:
    """Yield the step, float64 weights before it, and float32 gradients there; float64 AdamW makes the step."""
    torch.manual_seed(0)
    model = CharTransformer(vocab=256, context=CONTEXT, layers=2, width=width)
    exact = [nn.Parameter(p.detach().double()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(exact, lr=RATE)
    batches = text_task(steps=steps, batch=BATCH, context=CONTEXT).batches(0)
    for step, (inputs, targets) in zip(range(steps), batches, strict=False):
        for p, value in zip(model.parameters(), exact, strict=True):
            p.data.copy_(value.data)
        found = torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))
        yield step, exact, list(found)
        set_rate(optimizer, rate_at(step, steps))
        for value, grad in zip(exact, found, strict=True):
            value.grad = grad.double()
        optimizer.step()


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def weights(
    steps: int = STEPS, width: int = 64, sides: Mapping[str, Callable[..., torch.optim.Optimizer]] = SIDES
) -> dict[str, Any]:
    """Return each side's error after these steps, and the largest move of a weight in one step, in learning rates."""
    held: dict[str, list[nn.Parameter]] = {}
    optimizers, largest = {}, dict.fromkeys(sides, 0.0)
    start: list[Tensor] = []
    for step, exact, grads in gradients(steps, width):
        if not held:
            start = [p.detach().clone() for p in exact]
            held = {side: [nn.Parameter(p.detach().float()) for p in exact] for side in sides}
            optimizers = {side: make(held[side], lr=RATE) for side, make in sides.items()}
        rate = rate_at(step, steps)
        for side, optimizer in optimizers.items():
            before = [p.detach().clone() for p in held[side]]
            for p, grad in zip(held[side], grads, strict=True):
                p.grad = grad.clone()
            set_rate(optimizer, rate)
            optimizer.step()
            moved = max(float((p.detach() - b).abs().max()) for p, b in zip(held[side], before, strict=True))
            largest[side] = max(largest[side], moved / rate)
        last = exact
    end = [p.detach() for p in last]
    whole = norm([b - a for a, b in zip(start, end, strict=True)])
    return {
        side: {
            "error": norm([p.detach() - e for p, e in zip(held[side], end, strict=True)]) / whole,
            "largest_move": largest[side],
        }
        for side in sides
    }


Map = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From an average of squares (float32, flat), independent bits and golden ones to what is held."""


def _nearest(fmt: str, block: int, x: Tensor, *_: Tensor) -> Tensor:
    return fxprec.quantize(_scaled(x, block, fmt)[0], fmt) * _scaled(x, block, fmt)[1]


def _scaled(x: Tensor, block: int, fmt: str) -> tuple[Tensor, Tensor]:
    """Return numbers by the power of two that puts their block's largest into the format's highest binade."""
    amax = torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block).amax(1).clamp_min(2.0**-120)
    scale = torch.exp2(torch.floor(torch.log2(amax)) - parse(fmt).max_exponent)
    scale = scale.repeat_interleave(block)[: len(x)]
    return x / scale, scale


def _linear(block: int, x: Tensor, *_: Tensor) -> Tensor:
    amax = torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block).amax(1).clamp_min(1e-38)
    unit = (amax / 255).repeat_interleave(block)[: len(x)]
    return torch.round(x / unit) * unit


def _dynamic(x: Tensor, *_: Tensor) -> Tensor:
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor
    from torchao.optim.subclass_8bit import get_qmap_unsigned

    table = torch.tensor(get_qmap_unsigned())
    scaled, scale = scale_tensor(torch.nn.functional.pad(x, (0, -len(x) % 256)), 256)
    return dequant_with_qmap(quantize_8bit_with_qmap(scaled, table), table, scale)[: len(x)]


def _coded(x: Tensor, random: Tensor | None) -> Tensor:
    codes = states.codes_of("8bit", "exp_avg_sq")
    return states.decode(codes, *states.encode(codes, x, random), len(x))


MAPS: dict[str, Map] = {
    "linear, blocks of 256, nearest": partial(_linear, 256),
    "dynamic (torchao, bitsandbytes), blocks of 256, nearest": _dynamic,
    "5 exponent and 3 mantissa bits, blocks of 256, nearest": partial(_nearest, "1-5-3", 256),
    "bfloat16, nearest": lambda x, *_: x.bfloat16().float(),
    "3 and 5 bits, blocks of 64, never to zero, nearest": lambda x, *_: _coded(x, None),
    "the same, independent bits": lambda x, independent, golden: _coded(x, independent),
    "the same, golden bits (fxprec)": lambda x, independent, golden: _coded(x, golden),
}


def maps(steps: int = STEPS, width: int = 64) -> dict[str, Any]:
    """Return errors as `weights` does, with an exact first moment, and the spread of held over exact averages."""
    beta1, beta2 = 0.9, 0.999
    squares: dict[str, list[Tensor]] = {}
    off: dict[str, list[Tensor]] = {}
    means: list[Tensor] = []
    for step, exact, grads in gradients(steps, width):
        sizes = [g.numel() for g in grads]
        if not means:
            means = [torch.zeros(n, dtype=torch.float64) for n in sizes]
            squares = {name: [torch.zeros(n) for n in sizes] for name in MAPS}
            squares["exact"] = [torch.zeros(n, dtype=torch.float64) for n in sizes]
            off = {name: [torch.zeros(n, dtype=torch.float64) for n in sizes] for name in MAPS}
            start = [p.detach().clone() for p in exact]
        count = step + 1
        for i, grad in enumerate(g.flatten().double() for g in grads):
            means[i] = beta1 * means[i] + (1 - beta1) * grad
            squares["exact"][i] = beta2 * squares["exact"][i] + (1 - beta2) * grad * grad
            step_of = partial(_update, means[i] / (1 - beta1**count), count, beta2, rate_at(step, steps))
            wanted = step_of(squares["exact"][i])
            index = torch.arange(len(grad), dtype=torch.int32)
            integers = [torch.tensor(n, dtype=torch.int32) for n in (i, 1, step)]
            bits = random_bits(index, *integers), dither_bits(index, *integers, 2)
            for name, held in MAPS.items():
                new = beta2 * squares[name][i] + (1 - beta2) * grad.float() * grad.float()
                off[name][i] += step_of(new.double()) - wanted
                squares[name][i] = held(new, *bits)
        last = exact
    whole = norm([b.detach() - a for a, b in zip(start, last, strict=True)])
    rows = {}
    for name in MAPS:
        pairs = zip(squares[name], squares["exact"], strict=True)
        ratio = torch.cat([a[b > 0] / b[b > 0] for a, b in pairs])
        low, middle, high = (float(q) for q in torch.quantile(ratio, torch.tensor([0.01, 0.5, 0.99]).double()))
        rows[name] = {"error": norm(off[name]) / whole, "held_over_exact": [low, middle, high]}
    return rows


def _update(mean: Tensor, count: int, beta2: float, rate: float, square: Tensor) -> Tensor:
    return -rate * mean / ((square / (1 - beta2**count)).sqrt() + 1e-8)


def training(
    steps: int = 1200,
    width: int = 128,
    seeds: int = 1,
    sides: Mapping[str, Callable[..., torch.optim.Optimizer]] = SIDES,
    dtype: torch.dtype = torch.float32,
    passes: int = 1,
    recipe: str = "",
) -> dict[str, Any]:
    """Return, for each side, held-out loss by seed and the training loss of the last tenth, in nats a byte.

    A step's batch of 16 goes through that many backward passes. With a recipe the model is compiled, with the optimizer.
    """
    found: dict[str, Any] = {}
    task = text_task(steps=steps, batch=16, context=CONTEXT)
    for seed in range(seeds):
        for side, make in sides.items():
            torch.manual_seed(seed)
            model = CharTransformer(vocab=256, context=CONTEXT, layers=2, width=width)
            model.to(dtype)
            optimizer = make(model.parameters(), lr=RATE)
            sums = optimizer.defaults.get("gradients") == "bf16"
            trained = _compiled(model, optimizer, recipe or "fp32") if recipe or sums else model
            losses, began = [], time.perf_counter()
            for step, (inputs, targets) in zip(range(steps), task.batches(seed), strict=False):
                set_rate(optimizer, rate_at(step, steps))
                parts_of_loss = []
                for part, wanted in zip(inputs.chunk(passes), targets.chunk(passes), strict=True):
                    loss = cross_entropy(trained(part), wanted) / passes
                    loss.backward()
                    parts_of_loss.append(float(loss.detach()))
                    if side == NEAREST:
                        _round_sums(model)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(sum(parts_of_loss))
            with torch.no_grad():
                held_out = task.evaluate(model.eval())
            row = {"held_out": held_out, "training": statistics.mean(losses[-steps // 10 :])}
            print(side, seed, row, f"{time.perf_counter() - began:.0f} s", flush=True)
            found.setdefault(side, []).append(row)
    return found


def _round_sums(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.copy_(p.grad.bfloat16())


def _compiled(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str) -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = _COMPILE(
        model, backend="fxprec", options={"recipe": recipe, "optimizer": optimizer}
    )
    return compiled


def times(steps: int = 13) -> dict[str, Any]:
    """Return milliseconds of processor time of ``step()``, one thread, 4.9 million weights in 77 tensors."""
    found = {}
    for side, make in SIDES.items():
        model = CharTransformer(vocab=96, context=256, layers=6, heads=8, width=256)
        optimizer, seconds = make(model.parameters(), lr=RATE), []
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        for _ in range(steps):
            began = time.process_time()
            optimizer.step()
            seconds.append(time.process_time() - began)
        found[side] = {"step_ms": 1e3 * statistics.median(seconds[3:])}
    return found


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "maps": maps,
    "weights": weights,
    "training": training,
    "bf16": partial(training, sides=BF16_WEIGHTS, dtype=torch.bfloat16),
    "whole": partial(training, seeds=3, sides=WHOLE, dtype=torch.bfloat16, recipe="fp8"),
    "weights-4bit": partial(weights, sides=FEWER),
    "training-4bit": partial(training, seeds=3, sides=FEWER),
    "clipping": partial(training, seeds=3, sides=CLIPPED),
    "summed": partial(training, seeds=3, sides=SUMMED, passes=16),
    "muon": partial(training, seeds=3, sides=MUON),
    "times": times,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given = {} if args.steps is None else {"steps": args.steps}
    # torchao compiles its step anew for each shape, which bits do not need.
    uncompiled = mock.patch("torch.compile", lambda step, **_: step)
    with contextlib.nullcontext() if args.part == "times" else uncompiled:
        rows = PARTS[args.part](**given)
    for name, row in rows.items():
        print(f"{name:60} {row}")
    print("wrote", machine.save(f"optim-states-{args.part}", {**given, "sides": rows}))


if __name__ == "__main__":
    main()
