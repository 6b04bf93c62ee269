"""Train with GEMM operands rounded to blocks: held-out loss under mxfp8 and nvfp4 beside bf16's.

    python -m benchmarks.fidelity.block_gemms --steps 300 --seeds 0 1 2
    python -m benchmarks.fidelity.block_gemms --steps 20 --sides bf16 nvfp4

The byte-level transformer of `benchmarks.fidelity.training`. Its loss is compiled with it; the held-out loss is that of
the float32 module, and the training loss that of the rounded one. Same seed: same weights, same batches.

Three sides hold layers with at most 15 % of the weights high: those that `fxprec.doctor` recommends at the seed's first
weights, the last ones that fit, and ones drawn at random.
"""

from __future__ import annotations

import argparse
import random
import warnings
from dataclasses import asdict, replace
from typing import Any

import torch

import fxprec
from benchmarks import machine
from benchmarks.fidelity.training import Run, WithLoss, byte_task, lines, train
from fxprec.config.recipes import NVFP4
from fxprec.demo.tasks import Task
from fxprec.numerics import blocks


def _every_product(fmt: blocks.BlockFormat, name: str) -> fxprec.Recipe:
    return replace(NVFP4, operands=fxprec.Operands(forward=fmt, input_grad=fmt, weight_grad=fmt), name=name)


def _nvfp4(name: str, **switches: Any) -> fxprec.Recipe:
    assert NVFP4.operands is not None
    return replace(NVFP4, operands=replace(NVFP4.operands, **switches), name=name)


_EDEN = {"hadamard": False, "stochastic": False, "eden": 64}  # widths are multiples of 64


SIDES: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "mxfp8": {"recipe": "mxfp8"},
    "mxfp8, OCP scales": {"recipe": _every_product(blocks.MXFP8_E4M3, "mxfp8-ocp")},
    "nvfp4 plain": {"recipe": _every_product(blocks.NVFP4, "nvfp4-plain")},
    "nvfp4": {"recipe": "nvfp4"},
    "nvfp4, ends high": {"recipe": "nvfp4", "keep_high": "ends"},
    "nvfp4, MS-EDEN": {"recipe": _nvfp4("nvfp4-eden", **_EDEN)},
    "nvfp4, in bf16 from step 240": {"recipe": _nvfp4("nvfp4-then-bf16", high_after=240)},
}
SHARE = 0.15
"""Of the weights, at most, in layers that are held high."""


def by_damage(task: Task, seed: int) -> tuple[str, ...]:
    """Return the layers that the doctor recommends to hold high, at the first weights and batch."""
    torch.manual_seed(seed)
    model = WithLoss(task.make_model())
    options = {"recipe": "nvfp4", "high_share": SHARE, "reruns": 0}
    found = fxprec.doctor(model, next(iter(task.batches(seed))), loss=lambda loss: loss, options=options)
    return tuple(found.recommended["keep_high"])


def last(task: Task, seed: int) -> tuple[str, ...]:
    """Return the last layers that fit into the share, from the last on."""
    return _fitting(list(reversed(_layers(task).items())))


def at_random(task: Task, seed: int) -> tuple[str, ...]:
    """Return layers drawn at random that fit into the share."""
    drawn = list(_layers(task).items())
    random.Random(seed).shuffle(drawn)
    return _fitting(drawn)


HIGH = {
    "nvfp4, 15 % high by damage": by_damage,
    "nvfp4, 15 % high, the last": last,
    "nvfp4, 15 % high at random": at_random,
}


def _layers(task: Task) -> dict[str, int]:
    """Return the elements of each linear layer's weight."""
    modules = WithLoss(task.make_model()).named_modules()
    return {name: module.weight.numel() for name, module in modules if isinstance(module, torch.nn.Linear)}


def _fitting(layers: list[tuple[str, int]]) -> tuple[str, ...]:
    left, found = SHARE * sum(size for _, size in layers), []
    for name, size in layers:
        if size <= left:
            found.append(name)
            left -= size
    return tuple(found)


def options_of(side: str, task: Task, seed: int) -> dict[str, Any]:
    """Return fxprec's options of a side."""
    return SIDES[side] if side in SIDES else {"recipe": "nvfp4", "keep_high": HIGH[side](task, seed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", choices=[*SIDES, *HIGH], default=[*SIDES, *HIGH])
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    torch.set_num_threads(1)
    runs: list[Run] = []
    for seed in args.seeds:
        for side in args.sides:
            task = byte_task(args.steps)
            options = options_of(side, task, seed)
            print(side, *options.get("keep_high", ()), flush=True)
            runs.append(train(task, side, seed, sides={side: options}))
            print(*(f"{key} {value}" for key, value in asdict(runs[-1]).items()), sep="  ", flush=True)
            path = machine.save("block-gemms", {"arguments": vars(args), "runs": [asdict(run) for run in runs]})
    print("\n".join(["", *lines(runs, "bf16")]))
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
