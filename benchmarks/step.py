"""Training step: compile seconds, step milliseconds and bytes saved for backward, fxprec beside plain Inductor.

    python -m benchmarks.step --model resnet18 --batch 32
    python -m benchmarks.step --model transformer --batch 8 --sides autocast inductor "native bf16" "native fp8 r=1"

Every side is compiled with cold caches, in turn (A B C, A B C); the least disturbed, shortest compilation counts.
Steps are timed in turn too (A B C, A B C, ...); the ratio is the median of the ratios of neighbours, to the first of
the sides. torch's sides get their memory from torch's own allocator, fxprec's from that which ``--allocator`` names
(docs/memory.md). One thread is timed by its processor time, which other work on the machine disturbs least; several by
the wall clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, pairwise

import torch
import torch._inductor.config
from torch import nn

import fxprec
from benchmarks import machine
from fxprec.config.config import ALLOCATORS
from fxprec.runtime.cpu import compact

SIDES: dict[str, dict[str, object] | None] = {
    "inductor": None,
    "autocast": None,
    "packed r=1": {"recipe": "hfp8", "storage": "packed", "low_ratio": 1.0},
    "native fp8 r=1": {"recipe": "fp8", "storage": "native", "low_ratio": 1.0},
    "native bf16": {"recipe": "bf16", "storage": "native"},
}


@dataclass
class Row:
    """One side's figures; ratios are to the first side of the same run."""

    side: str
    compile_s: float = 0.0
    compiles_s: list[float] = field(default_factory=list)
    passes_s: float = 0.0
    saved_mb: float = 0.0
    step_ms: float = 0.0
    compile_ratio: float = 0.0
    step_ratio: float = 0.0
    saved_ratio: float = 0.0
    steps_ms: list[float] = field(default_factory=list)


def make(
    name: str, batch: int, width: float, sequence: int, dropout: float = 0.0
) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]:
    """Return (model factory, loss of a model on a fixed batch)."""
    torch.manual_seed(1)
    if name == "resnet18":
        from examples.models.resnet import resnet18

        x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 100, (batch,))
        return lambda: resnet18(width=width), lambda m: nn.functional.cross_entropy(m(x), y)
    if name == "mlp":
        rows = torch.randn(batch, 64)
        return lambda: _layers(int(64 * width)), lambda m: m(rows).square().mean()
    from fxprec.demo.models import CharTransformer

    tokens = torch.randint(0, 96, (batch, sequence))

    def loss(m: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten())

    def transformer() -> nn.Module:
        model = CharTransformer(vocab=96, context=sequence, layers=6, heads=4, width=int(256 * width))
        for block in model.blocks if dropout else ():
            block.out, block.down = (nn.Sequential(layer, nn.Dropout(dropout)) for layer in (block.out, block.down))
        return model

    return transformer, loss


def _layers(width: int) -> nn.Module:
    """Eight small layers, where what a call costs shows."""
    sizes = [64, *[width] * 8]
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(sizes)]
    return nn.Sequential(*chain(*layers))


def compile_side(
    row: Row, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], allocator: str
) -> Callable[[], None]:
    """Compile one side, fill in what its first step shows, and return a function that times steps."""
    options = SIDES[row.side]
    backend = "inductor" if options is None else fxprec.Backend(fxprec.Config.from_options(options))
    compiled = torch.compile(model, backend=backend)
    context = partial(torch.autocast, "cpu", torch.bfloat16) if row.side == "autocast" else nullcontext
    saved: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:  # they are there anyway
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    allocate = compact.install if options is not None and allocator == "compact" else compact.uninstall
    allocate()
    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), context():
        value = loss(compiled)
    value.backward()
    row.compiles_s.append(round(time.perf_counter() - start, 2))
    row.saved_mb = sum(saved.values()) / 1e6
    if isinstance(backend, fxprec.Backend):
        row.passes_s = sum(report.passes_seconds for report in backend.compile_reports)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with context():
            value = loss(compiled)
        value.backward()

    return partial(_timed, row, step, allocate)


SHORTEST_S = 0.02  # of what is timed at once: short steps are repeated


def _timed(row: Row, step: Callable[[], None], allocate: Callable[[], object]) -> None:
    allocate()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    count, seconds = 0, 0.0
    begin = clock()
    while seconds < SHORTEST_S:
        step()
        count, seconds = count + 1, clock() - begin
    row.steps_ms.append(1e3 * seconds / count)


def run(args: argparse.Namespace) -> list[Row]:
    """Measure ``sides``; the first is the one compared with."""
    steps, compiles, sides = args.steps, args.compiles, args.sides
    factory, loss = make(args.model, args.batch, args.width, args.sequence, args.dropout)
    rows = [Row(side) for side in sides]
    for i in range(compiles):
        torch.compiler.reset()  # or Dynamo takes the last round's code for the same model
        step_functions = []
        for row in rows:
            torch.manual_seed(0)
            print(f"compiling {row.side}, {i + 1} of {compiles} ...", flush=True)
            step_functions.append(compile_side(row, factory(), loss, args.allocator))
    for i in range(steps + 2):
        print(f"step {i + 1} of {steps + 2}", end="\r", flush=True)
        for step in step_functions:
            step()
    for row in rows:
        row.steps_ms = [round(t, 4) for t in row.steps_ms[2:]]
        row.step_ms = statistics.median(row.steps_ms)
        row.compile_s = min(row.compiles_s) - row.step_ms / 1e3
        row.compile_ratio = round(row.compile_s / rows[0].compile_s, 3)
        pairs = zip(row.steps_ms, rows[0].steps_ms, strict=True)
        row.step_ratio = round(statistics.median(ours / plain for ours, plain in pairs), 3)
        row.saved_ratio = round(row.saved_mb / rows[0].saved_mb, 4)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("resnet18", "transformer", "mlp"), default="resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=256, help="tokens, of the transformer")
    parser.add_argument("--dropout", type=float, default=0.0, help="of what the transformer's layers add")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--compiles", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--allocator", choices=ALLOCATORS, default="system", help="of fxprec's sides")
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    torch._inductor.config.force_disable_caches = True
    torch.set_num_threads(args.threads)
    rows = run(args)
    path = machine.save(
        f"step-{args.model}{'-dropout' if args.dropout else ''}",
        {"arguments": vars(args), "sides": [asdict(r) for r in rows]},
    )
    print(
        f"{'side':16} {'compile s':>10} {'passes s':>9} {'ratio':>6} {'step ms':>9} {'ratio':>6} {'saved MB':>9} {'ratio':>7}"
    )
    for r in rows:
        print(
            f"{r.side:16} {r.compile_s:10.1f} {r.passes_s:9.2f} {r.compile_ratio:6.2f} {r.step_ms:9.2f} {r.step_ratio:6.3f}"
            f" {r.saved_mb:9.1f} {r.saved_ratio:7.4f}"
        )
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
