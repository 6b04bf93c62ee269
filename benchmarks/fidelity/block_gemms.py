"""Train with GEMM operands rounded to blocks: held-out loss under mxfp8 and nvfp4 beside bf16's.

    python -m benchmarks.fidelity.block_gemms --steps 300 --seeds 0 1 2
    python -m benchmarks.fidelity.block_gemms --steps 20 --sides bf16 nvfp4

The byte-level transformer of `benchmarks.fidelity.training`. Its loss is compiled with it; the held-out loss is that of
the float32 module, and the training loss that of the rounded one. Same seed: same weights, same batches.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict, replace
from typing import Any

import torch

import fxprec
from benchmarks import machine
from benchmarks.fidelity.training import Run, byte_task, lines, train
from fxprec.config.recipes import NVFP4
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", choices=list(SIDES), default=list(SIDES))
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    torch.set_num_threads(1)
    runs: list[Run] = []
    for seed in args.seeds:
        for side in args.sides:
            runs.append(train(byte_task(args.steps), side, seed, sides=SIDES))
            print(*(f"{key} {value}" for key, value in asdict(runs[-1]).items()), sep="  ", flush=True)
            path = machine.save("block-gemms", {"arguments": vars(args), "runs": [asdict(run) for run in runs]})
    print("\n".join(["", *lines(runs, "bf16")]))
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
