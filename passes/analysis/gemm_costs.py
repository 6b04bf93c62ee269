"""Estimate a GEMM's time over codes and over decoded values, by GPU, from the figures in ``gemm_costs.json``.

The plan chooses which tensors are stored in 8 bits. This module compares two ways to multiply them: over the codes,
with a transposed copy if the tensor cores need one, or over decoded values in high precision. A GEMM takes the longer
of its arithmetic and its memory traffic, and each kernel takes a launch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FIGURES = Path(__file__).with_name("gemm_costs.json")
_CODE_BYTES = 1
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether multiplying codes pays for a GEMM and its backward, and why. ``pays`` is None if nobody asked."""

    pays: bool | None
    why: str


@dataclass(frozen=True)
class Gpu:
    """A device as torch describes it."""

    name: str
    capability: tuple[int, int]

    @property
    def has_fp8(self) -> bool:
        """Return whether the tensor cores multiply 8-bit floats."""
        return self.capability >= FP8_CAPABILITY


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU that a graph is compiled for, or None on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, (properties.major, properties.minor))


@dataclass(frozen=True)
class Costs:
    """Rates of one device."""

    source: str
    """``measured`` or ``estimate``, with the GPU that the figures are of if it is another one."""
    bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float | None
    generated_flop_per_s: float
    """Rate of generated kernels for codes of formats without NaN."""
    generated_special_flop_per_s: float
    """Rate for codes of a format with NaN, which take more instructions to decode."""
    fp32_flop_per_s: float
    launch_s: float
    """Seconds of the device between two kernels. In that time the host starts one kernel of Inductor or torch."""
    own_host_s: float
    """Seconds of the host to start a kernel of fxprec, which compiled code calls through Python."""
    host_bytes_per_s: float = 2.5e10
    """Rate between the device and pinned host memory, each way."""
    multiprocessors: int = 132
    clock_hz: float = 1.8e9

    def rate_of(self, product: Product) -> float:
        """Return the operations per second of a GEMM over codes."""
        if product.kernel == "native":
            assert self.fp8_flop_per_s is not None
            return self.fp8_flop_per_s
        return self.generated_special_flop_per_s if product.has_special else self.generated_flop_per_s

    def product(self, m: int, n: int, k: int, rate: float, operand_bytes: float, out_bytes: float = 2) -> float:
        """Return the seconds of one GEMM at ``rate`` operations a second, ``operand_bytes`` an element; no launch."""
        traffic = (operand_bytes * (m * k + k * n) + out_bytes * m * n) / self.bytes_per_s
        return max(2.0 * m * n * k / rate, traffic)


@cache
def _figures() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(_FIGURES.read_text(encoding="utf-8"))
    return found


def known_gpus() -> dict[str, Gpu]:
    """Return the devices that have figures of their own, by lower-case name."""
    found = [Gpu(d["name"], (d["capability"][0], d["capability"][1])) for d in _figures()["devices"]]
    return {gpu.name.lower(): gpu for gpu in found}


def margin() -> float:
    """Return the fraction of the high GEMM's time that the low GEMM must stay below."""
    return float(_figures()["margin"])


def costs_of(gpu: Gpu) -> Costs:
    """Return a device's figures, or those of another device, which ``source`` then names.

    The other device is the newest of the same kind that is not newer than this device. A GPU with HBM has several times
    the bandwidth of one with GDDR memory, whatever their age.
    """
    devices = _figures()["devices"]
    named = [d for d in devices if re.search(rf"\b{d['name']}\b", gpu.name)]
    alike = [d for d in devices if _has_gddr(d["capability"]) == _has_gddr(gpu.capability)]
    older = sorted((d for d in alike if tuple(d["capability"]) <= gpu.capability), key=lambda d: d["capability"])
    entry = named[0] if named else (older or alike)[-1]
    values = {name: entry[name] for name in Costs.__dataclass_fields__}
    if named:
        return Costs(**values)
    rate = entry["fp8_flop_per_s"] if gpu.has_fp8 else None
    return Costs(**values | {"source": f"estimate by figures of {entry['name']}", "fp8_flop_per_s": rate})


def _has_gddr(capability: Sequence[int]) -> bool:
    """Return whether GPUs of a compute capability have GDDR memory: 8.6, 8.9, 12.0; not 8.0, 9.0, 10.0, 10.3."""
    major, minor = capability
    return major == 12 or (major == 8 and minor > 0)


@dataclass(frozen=True)
class Product:
    """One GEMM node, and the work that multiplying its codes or its decoded operands takes. Sizes in elements."""

    m: int
    n: int
    k: int
    kernel: str
    """``native`` or ``generated``."""
    copies: tuple[int, ...] = ()
    """Sizes of transposed copies that a native GEMM needs and no GEMM before it made."""
    decodes: tuple[int, ...] = ()
    """Sizes of operands that forward saved: without a GEMM over codes, backward decodes each in a kernel of its own."""
    written: int = 0
    """Elements that the rounding kernel also writes decoded if the GEMM does not multiply codes."""
    high: torch.dtype = torch.bfloat16
    """Dtype in which the GEMM computes over decoded values."""
    has_special: bool = False
    """Whether an operand's format has a code for NaN."""


def low_seconds(products: Sequence[Product], costs: Costs, *, in_cuda_graph: bool = False) -> float:
    """Return the seconds of GEMMs over codes with their transposed copies: the device's time, or the host's if longer.

    The host starts kernels ahead of the device, so its time counts only if the device would wait. A CUDA graph needs no
    host.
    """
    device = sum(_low_on_device(p, costs) for p in products)
    return device if in_cuda_graph else max(device, sum(_low_on_host(p, costs) for p in products))


def _low_on_device(product: Product, costs: Costs) -> float:
    launches = (len(product.copies) + 1) * costs.launch_s
    copies = 2 * _CODE_BYTES * sum(product.copies) / costs.bytes_per_s
    return launches + copies + costs.product(product.m, product.n, product.k, costs.rate_of(product), _CODE_BYTES)


def _low_on_host(product: Product, costs: Costs) -> float:
    native = product.kernel == "native"
    return len(product.copies) * costs.own_host_s + (costs.launch_s if native else costs.own_host_s)


def high_seconds(products: Sequence[Product], costs: Costs) -> float:
    """Return the seconds of decoding the operands and multiplying in high precision. The host takes no longer."""
    return sum(_high_on_device(p, costs) for p in products)


def _high_on_device(product: Product, costs: Costs) -> float:
    wide = product.high.itemsize
    rate = costs.bf16_flop_per_s if wide == 2 else costs.fp32_flop_per_s
    launches = (len(product.decodes) + 1) * costs.launch_s
    moved = (_CODE_BYTES + wide) * sum(product.decodes) + wide * product.written
    return launches + moved / costs.bytes_per_s + costs.product(product.m, product.n, product.k, rate, wide)
