"""Compiling equal layers for a GPU that is not here: different kernels, CPU seconds, of each half.

    python -m benchmarks.gpu.equal_kernels            # six layers for an H100
    python -m benchmarks.gpu.equal_kernels --layers 12 --arch 100

Decoder layers of recipes bf16 and fp8 are lowered for the GPU by ``lowering="inductor"``. Inductor generates their code,
and Triton compiles each different kernel to machine code, in one process.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fxprec
from benchmarks import machine
from benchmarks.gpu.absent import GPUS, compiled_kernels, inductor_code, lowered_halves, pretend
from benchmarks.gpu.models import Decoder, Shape
from benchmarks.warm_start import cpu


def rows(recipe: str, layers: int, arch: int) -> list[dict[str, Any]]:
    """Return a row for each half of a training step."""

    def step() -> None:
        torch.manual_seed(0)
        config = fxprec.Config(recipe=recipe, low_ratio=1.0, lowering="eager")
        model = Decoder(Shape(width=256, hidden=896, heads=4, layers=layers))
        torch.compile(model, backend=fxprec.Backend(config))(torch.randn(2, 128, 256)).square().mean().backward()

    with pytest.MonkeyPatch.context() as patch:
        halves = lowered_halves(patch, step, "inductor", arch)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        pretend(patch, arch)
        return [
            {
                "recipe": recipe,
                "layers": layers,
                "gpu": GPUS[arch].name,
                "half": half,
                **compiled(gm, half, Path(folder)),
            }
            for gm, half in zip(halves, ("forward", "backward"), strict=True)
        ]


def compiled(gm: torch.fx.GraphModule, half: str, folder: Path) -> dict[str, Any]:
    """Generate a half's code and compile its kernels; seconds of this process and of the assembler."""
    nodes, start = len(gm.graph.nodes), cpu()
    code = inductor_code(gm, half)
    generated = cpu()
    made = len(list(compiled_kernels(code, folder)))
    return {
        "nodes": nodes,
        "kernels": code.count("async_compile.triton("),
        "launches": code.count(".run("),
        "code_s": round(generated - start, 1),
        "machine_code_s": round(cpu() - generated, 1),
        "configurations": made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--arch", type=int, choices=GPUS, default=90)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for recipe in ("bf16", "fp8"):
        for row in rows(recipe, args.layers, args.arch):
            found.append(row)
            print(row, flush=True)
    print(machine.save("gpu-equal-kernels", found).name)


if __name__ == "__main__":
    main()
