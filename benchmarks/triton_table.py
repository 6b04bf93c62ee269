"""Every generated kernel of the test models, compiled ahead of time for four GPUs: registers, spills, shared memory.

    python -m benchmarks.triton_table

Needs no GPU: the models run one step on fake tensors, which allocates and computes nothing, and Triton compiles what
was generated. A kernel that spills, or wants more shared memory than a program can have, makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own deprecations, at import
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fxprec
    from benchmarks import machine
    from fxprec import compat
    from fxprec.numerics import ahead
    from fxprec.numerics.ahead import ARCHITECTURES


class Block(nn.Module):
    """Pre-norm transformer block with a gated feed-forward layer, as Llama's; (batch, tokens, width)."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        share = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((share @ v).transpose(1, 2).reshape(batch, tokens, width))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def bottleneck() -> nn.Module:
    """ResNet-50's second stage: 1x1, 3x3 and 1x1 convolutions with batch norm."""
    layers: list[nn.Module] = []
    for channels_in, channels, size in ((256, 64, 1), (64, 64, 3), (64, 256, 1)):
        layers += [nn.Conv2d(channels_in, channels, size, padding=size // 2, bias=False), nn.BatchNorm2d(channels)]
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.GELU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (perceptron, lambda: torch.empty(128, 784)),
    "block 4096": (lambda: Block(4096, 14336, 32), lambda: torch.empty(1, 2048, 4096)),
    "bottleneck": (bottleneck, lambda: torch.empty(32, 256, 56, 56).to(memory_format=torch.channels_last)),
}
RECIPES: Mapping[str, dict[str, Any]] = {
    "fp8": {"recipe": "fp8", "storage": "native", "low_ratio": 1.0},
    "hfp8 packed": {"recipe": "hfp8", "storage": "packed", "low_ratio": 0.6},
    "hfp8 simulate": {"recipe": "hfp8", "storage": "simulate", "low_ratio": 0.6},
}
CASES = (
    ("perceptron", "hfp8 packed"),
    ("perceptron", "hfp8 simulate"),
    ("block 4096", "fp8"),
    ("bottleneck", "hfp8 packed"),
)


def generate(
    make: Callable[[], nn.Module], data: Callable[[], Tensor], config: Mapping[str, Any], folder: Path
) -> None:
    """Dump the kernels of one training step, forward and backward, as a GPU would get them."""
    torch.compiler.reset()
    with (
        mock.patch.object(compat, "no_triton", return_value=None),
        FakeTensorMode(allow_non_fake_inputs=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        backend = fxprec.Backend(fxprec.Config(lowering="triton", dump=folder, cpu="avx512+bf16", **config))
        torch.compile(make(), backend=backend)(data()).sum().backward()


def kernels(folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what each dumped kernel is launched with, and its source; each source once."""
    seen = set()
    for index in sorted(folder.glob("**/kernels/*.json")):
        for kernel in json.loads(index.read_text(encoding="utf-8"))["kernels"]:
            if kernel["name"] not in seen:
                seen.add(kernel["name"])
                yield kernel, (index.parent / kernel["file"]).read_text(encoding="utf-8")


def compile_for(kernel: Mapping[str, Any], source: str, arch: int) -> ahead.Resources:
    """Compile to machine code, memory aligned and sizes even, as they are nearly always."""
    parameters = [(name, kind) for name, kind in kernel["parameters"]]
    compiled = ahead.compile_generated(source, kernel["name"], parameters, kernel["num_warps"], arch)
    return ahead.resources(compiled, arch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the table under benchmarks/results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    rows, failures, start = [], [], time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        for model, recipe in CASES:
            make, data = MODELS[model]
            generate(make, data, RECIPES[recipe], Path(name) / model / recipe)
        seconds = time.perf_counter() - start
        print(f"generated in {seconds:.0f} s")
        print(f"{'kernel':60} {'bytes':>12}" + "".join(f"{f'sm_{arch}':>8}" for arch in ARCHITECTURES) + "   registers")
        for kernel, source in kernels(Path(name)):
            found = {arch: compile_for(kernel, source, arch) for arch in ARCHITECTURES}
            failures += [f"{kernel['name']} on sm_{a}: {why}" for a, r in found.items() if (why := r.excess)]
            row = {k: kernel.get(k) for k in ("name", "bytes", "num_warps", "formats", "exact")}
            rows.append(row | {"sm": {arch: asdict(r) for arch, r in found.items()}})
            registers = "".join(f"{r.registers:8}" for r in found.values())
            print(f"{kernel['name']:60} {kernel.get('bytes', '')!s:>12}{registers}", flush=True)
    print(f"{len(rows)} kernels, {len(failures)} failures, {time.perf_counter() - start:.0f} s")
    if options.save:
        print(machine.save("triton-table", rows))
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
