"""From launches to multiplications and seconds, by the figures of ``gemm_costs.json``.

A launch takes its overhead and then as long as memory, arithmetic or the issue of its instructions takes, whichever is
longest. Nothing overlaps between launches, and caches keep nothing from one to the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu.absent import GPUS as DEVICES
from benchmarks.gpu.roofline.issue import Issue
from benchmarks.gpu.roofline.replay import Launch, Memory, Replay
from fxprec.passes.analysis.gemm_costs import costs_of

ATTENTION_SHARE: Mapping[str, float] = {"cudnn": 0.6, "flash": 0.42, "efficient": 0.2}
"""Share of the bf16 rate that attention's kernels reach, by heads of 128 elements and a causal mask. Estimates: cuDNN and
flash from the figures of FlashAttention-3's paper (Shah et al. 2024) for an H100, torch's memory-efficient kernel at half
of flash as in FlashAttention-2's (Dao 2023) for an A100."""
_SCHEDULERS = 4


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second. Rates of GEMMs are what large ones reach, not the data sheet's."""

    name: str
    bytes: float
    flops: dict[str, float]
    """By the dtype multiplied; attention's by its kernel."""
    launch_seconds: float
    cycles: float
    """Cycles of all schedulers."""
    source: str

    @classmethod
    def of(cls, arch: int) -> Rates:
        """Return the rates that fxprec itself weighs GEMMs by."""
        costs, name = costs_of(DEVICES[arch]), DEVICES[arch].name.removeprefix("NVIDIA ").partition(" ")[0]
        flops = {"float32": costs.fp32_flop_per_s, "bfloat16": costs.bf16_flop_per_s}
        if costs.fp8_flop_per_s is not None:
            flops["fp8"] = costs.fp8_flop_per_s
        if DEVICES[arch].capability >= (10, 0) and costs.fp8_flop_per_s is not None:
            # NVIDIA's figures for the HGX B200, dense: FP4 9.0e15, FP8 4.5e15, BF16 2.25e15; with sparsity twice as many
            # (read at https://glennklockwood.com/garden/processors/B200).
            flops["fp4"] = 2 * costs.fp8_flop_per_s
        flops |= {"generated": costs.generated_flop_per_s, "generated, NaN": costs.generated_special_flop_per_s}
        flops |= {f"attention {kernel}": share * costs.bf16_flop_per_s for kernel, share in ATTENTION_SHARE.items()}
        cycles = _SCHEDULERS * costs.multiprocessors * costs.clock_hz
        return cls(name.partition("-")[0], costs.bytes_per_s, flops, costs.launch_s, cycles, costs.source)

    @property
    def fastest_attention(self) -> float:
        return max(rate for name, rate in self.flops.items() if name.startswith("attention"))


GPUS = {arch: Rates.of(arch) for arch in (80, 90, 100)}
A100, H100, B200 = GPUS.values()
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
    by_bytes: float = 0.0
    """Seconds if instructions took none."""

    @classmethod
    def of(cls, launch: Launch, rates: Rates, cycles: int = 0) -> Cost:
        """Estimate one; ``cycles`` of all warps to issue its instructions."""
        kind, flops, dtype = _work(launch)
        arithmetic = flops / rates.flops[dtype] if flops else 0.0
        moved = max((launch.read + launch.written) / rates.bytes, arithmetic)
        times = [rates.launch_seconds + seconds for seconds in (max(moved, cycles / rates.cycles), moved)]
        read, written = launch.read, launch.written
        return cls(launch.name, kind, read, written, flops, dtype, times[0], _described(launch), times[1])

    @property
    def is_bound_by_instructions(self) -> bool:
        return self.seconds > self.by_bytes


def _work(launch: Launch) -> tuple[str, float, str]:
    """Return kind, FLOPs, and the name of the rate that holds for them."""
    name = launch.name
    if launch.is_generated:
        return "memory", 0.0, ""
    if "scaled_dot_product" in name:
        return "attention", _attention_flops(launch), _attention_rate(launch)
    if "convolution" in name:
        return "gemm", _convolution_flops(launch), _rate_of(launch.inputs[0])
    if "fxprec.scaled_mm" in name:
        return "gemm", _scaled_flops(launch), _scaled_rate(launch)
    if "matmul" in name:
        special = any(x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for x in launch.inputs)
        return "gemm", _product_flops(launch), "generated, NaN" if special else "generated"
    if "mm" in name:
        return "gemm", _product_flops(launch), _rate_of(_factors(launch)[0])
    return "memory", 0.0, ""


def _factors(launch: Launch) -> tuple[Memory, Memory]:
    matrices = [m for m in launch.inputs if len(m.shape) >= 2 and m.dtype != torch.int32]
    first, second = matrices[-2:] if "addmm" in launch.name else matrices[:2]
    return first, second


def _product_flops(launch: Launch) -> float:
    """Of codes of 4 bits an element of a tensor holds two."""
    a, b = _factors(launch)
    return 2.0 * math.prod(a.shape) * b.shape[-1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1)


def _scaled_rate(launch: Launch) -> str:
    """Return the rate of a product of operands in blocks: of NVFP4's the tensors' own scales come in too."""
    return "fp4" if any(x.shape == (1,) for x in launch.inputs) else "fp8"


def _scaled_flops(launch: Launch) -> float:
    """Codes (M, bytes) by (N, bytes): two codes a byte where they have 4 bits."""
    a, b = launch.inputs[:2]
    return 2.0 * math.prod(a.shape) * b.shape[0] * (2 if _scaled_rate(launch) == "fp4" else 1)


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


def _attention_rate(launch: Launch) -> str:
    if launch.inputs[0].dtype == torch.float32:
        return "float32"
    (kernel,) = (kernel for kernel in ATTENTION_SHARE if kernel in launch.name)
    return f"attention {kernel}"


def _rate_of(x: Memory) -> str:
    if x.dtype == torch.float4_e2m1fn_x2:
        return "fp4"
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
    def of(cls, found: Replay, rates: Rates, issue: Issue) -> Half:
        costs = tuple(Cost.of(launch, rates, issue.cycles(launch)) for launch in found.launches)
        return cls(costs, found.peak, found.saved)

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
            "seconds_by_bytes": sum(cost.by_bytes for cost in self.costs),
            "peak_bytes": self.peak,
            "saved_bytes": self.saved,
            "kernels": [asdict(cost) for cost in self.costs],
        }
