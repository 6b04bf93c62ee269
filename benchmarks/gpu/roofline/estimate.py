"""From launches to multiplications and seconds, by stated rates.

A launch takes its overhead and then as long as memory or arithmetic takes, whichever is longer. Nothing overlaps
between launches, and caches keep nothing from one to the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu.roofline.replay import Launch, Memory, Replay


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second. Rates of GEMMs are what large ones reach, not the data sheet's."""

    name: str
    bytes: float
    flops: dict[str, float]
    """By the dtype multiplied."""
    launch_seconds: float = 3e-6


H100 = Rates("H100", 2.8e12, {"float32": 60e12, "bfloat16": 700e12, "fp8": 1250e12, "generated": 470e12})
# NVIDIA's data sheets, dense, times what the H100's figures above are of its own (0.71 of bf16, 0.84 of bytes).
A100 = Rates("A100", 1.7e12, {"float32": 17e12, "bfloat16": 220e12, "generated": 150e12})
B200 = Rates("B200", 6.7e12, {"float32": 60e12, "bfloat16": 1600e12, "fp8": 3000e12, "generated": 800e12})
GPUS = {80: A100, 90: H100, 100: B200}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


@dataclass(frozen=True)
class Cost:
    """One launch, estimated."""

    name: str
    kind: str
    """``gemm``, ``attention``, or ``memory`` for everything else."""
    read: int
    written: int
    flops: float
    dtype: str
    seconds: float
    what: str

    @classmethod
    def of(cls, launch: Launch, rates: Rates) -> Cost:
        kind, flops, dtype = _work(launch)
        arithmetic = flops / rates.flops[dtype] if flops else 0.0
        seconds = rates.launch_seconds + max((launch.read + launch.written) / rates.bytes, arithmetic)
        return cls(launch.name, kind, launch.read, launch.written, flops, dtype, seconds, _described(launch))


def _work(launch: Launch) -> tuple[str, float, str]:
    """Return kind, FLOPs, and the name of the rate that holds for them."""
    name = launch.name
    if launch.is_generated:
        return "memory", 0.0, ""
    if "scaled_dot_product" in name:
        return "attention", _attention_flops(launch), _rate_of(launch.inputs[0])
    if "convolution" in name:
        return "gemm", _convolution_flops(launch), _rate_of(launch.inputs[0])
    if "matmul" in name:
        return "gemm", _product_flops(launch), "generated"
    if "mm" in name:
        return "gemm", _product_flops(launch), _rate_of(_factors(launch)[0])
    return "memory", 0.0, ""


def _factors(launch: Launch) -> tuple[Memory, Memory]:
    matrices = [m for m in launch.inputs if len(m.shape) >= 2 and m.dtype != torch.int32]
    first, second = matrices[-2:] if "addmm" in launch.name else matrices[:2]
    return first, second


def _product_flops(launch: Launch) -> float:
    a, b = _factors(launch)
    return 2.0 * math.prod(a.shape) * b.shape[-1]


def _convolution_flops(launch: Launch) -> float:
    """Of a convolution one product, of its backward two; the weight's first dimension is what it makes of each place."""
    images = [m for m in launch.inputs if len(m.shape) == 4]
    weight, place = images[-1], images[0] if "backward" in launch.name else launch.outputs[0]
    products = sum(len(m.shape) == 4 for m in launch.outputs) if "backward" in launch.name else 1
    return products * 2.0 * math.prod(place.shape) * math.prod(weight.shape[1:])


def _attention_flops(launch: Launch) -> float:
    """Two products forward, five backward; all are taken as causal: of half of the scores."""
    batch, heads, tokens, size = next(m.shape for m in launch.inputs if len(m.shape) == 4)
    products = 5 if "backward" in launch.name else 2
    return products * 2.0 * batch * heads * tokens * tokens * size / 2


def _rate_of(x: Memory) -> str:
    return "fp8" if x.dtype in _FP8 else "float32" if x.dtype == torch.float32 else "bfloat16"


def _described(launch: Launch) -> str:
    return f"{', '.join(map(_tensor, launch.inputs))} -> {', '.join(map(_tensor, launch.outputs))}"


def _tensor(x: Memory) -> str:
    dtype = str(x.dtype).removeprefix("torch.").replace("float", "f").replace("b" + "f16", "bf16")
    return f"{dtype}[{'x'.join(map(str, x.shape))}]"


@dataclass(frozen=True)
class Half:
    """The forward or the backward half of one side."""

    costs: tuple[Cost, ...]
    peak: int
    """Bytes; see `Replay`."""
    saved: int

    @classmethod
    def of(cls, found: Replay, rates: Rates) -> Half:
        return cls(tuple(Cost.of(launch, rates) for launch in found.launches), found.peak, found.saved)

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs)

    def bytes(self, kinds: Sequence[str] = ("memory",)) -> int:
        """Bytes read and written by launches of these kinds."""
        return sum(cost.read + cost.written for cost in self.costs if cost.kind in kinds)

    def flops(self) -> Counter[str]:
        """FLOPs by the name of the rate."""
        total: Counter[str] = Counter()
        for cost in self.costs:
            if cost.flops:
                total[cost.dtype] += int(cost.flops)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, one entry a launch."""
        return {
            "launches": len(self.costs),
            "bytes_outside_gemms": self.bytes(),
            "bytes": self.bytes(("memory", "gemm", "attention")),
            "flops": dict(self.flops()),
            "seconds": self.seconds,
            "peak_bytes": self.peak,
            "saved_bytes": self.saved,
            "kernels": [asdict(cost) for cost in self.costs],
        }
