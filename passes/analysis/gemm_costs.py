"""Estimate a GEMM's time over codes and over decoded values, by GPU, from the figures in ``gemm_costs.json``.

The plan chooses what is stored in 8 bits. This module compares two ways to multiply it: multiply the codes, with a
transposed copy where the tensor cores need one, or decode the codes and multiply in high precision. A GEMM takes the
longer of its arithmetic and its memory traffic; each kernel takes a launch.
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
    """Whether multiplying codes pays for a GEMM and its backward, and why. ``pays`` is None where nobody asked."""

    pays: bool | None
    why: str


@dataclass(frozen=True)
class Gpu:
    """A device as torch describes it."""

    name: str
    capability: tuple[int, int]

    @property
    def has_fp8(self) -> bool:
        """Say whether the tensor cores multiply 8-bit floats."""
        return self.capability >= FP8_CAPABILITY


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU a graph is compiled for, or None on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, (properties.major, properties.minor))


@dataclass(frozen=True)
class Costs:
    """Rates of one device."""

    source: str
    """``measured`` or ``estimate``, and of which GPU where it is another one."""
    bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float | None
    generated_flop_per_s: float
    """For codes of formats without inf and NaN."""
    generated_special_flop_per_s: float
    """For codes of a format with NaN, which takes more instructions to decode."""
    fp32_flop_per_s: float
    launch_s: float
    """Seconds of the device from one kernel to the next. The host starts a kernel of Inductor or torch in that time."""
    own_host_s: float
    """Seconds of the host to start a kernel of fxprec, which compiled code calls through Python."""
    host_bytes_per_s: float = 2.5e10
    """Between the device and pinned host memory, each way."""
    multiprocessors: int = 132
    clock_hz: float = 1.8e9

    def rate_of(self, product: Product) -> float:
        """Return the operations a second of a GEMM over codes."""
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
    """Return the devices with figures of their own, by name in small letters."""
    found = [Gpu(d["name"], (d["capability"][0], d["capability"][1])) for d in _figures()["devices"]]
    return {gpu.name.lower(): gpu for gpu in found}


def margin() -> float:
    """Return the share of the high GEMM's time that the low one must stay below."""
    return float(_figures()["margin"])


def costs_of(gpu: Gpu) -> Costs:
    """Return a device's figures, else another's, whose name ``source`` says then.

    The other is the newest of its kind that is not newer than the device. A card with memory of its own chip's package
    moves several times the bytes of one with GDDR memory, whatever their age.
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
    """Say whether GPUs of a compute capability have GDDR memory: 8.6, 8.9, 12.0; not 8.0, 9.0, 10.0, 10.3."""
    major, minor = capability
    return major == 12 or (major == 8 and minor > 0)


@dataclass(frozen=True)
class Product:
    """One GEMM node, and what multiplying its codes or their decoded numbers takes. Sizes in elements."""

    m: int
    n: int
    k: int
    kernel: str
    """``native`` or ``generated``."""
    copies: tuple[int, ...] = ()
    """Transposed copies that a native GEMM needs and no GEMM before it made."""
    decodes: tuple[int, ...] = ()
    """Sizes of operands saved by forward: without codes, backward decodes each in a kernel of its own."""
    written: int = 0
    """Elements that the rounding kernel also writes decoded where the GEMM does not multiply codes."""
    high: torch.dtype = torch.bfloat16
    """Dtype that the GEMM computes in over decoded values."""
    has_special: bool = False
    """Whether an operand's format has a code of NaN."""


def low_seconds(products: Sequence[Product], costs: Costs, *, in_cuda_graph: bool = False) -> float:
    """Return the seconds of GEMMs over codes with their transposed copies: the device's, or the host's if more.

    The host starts kernels ahead of the device, so its time counts only where the device would wait. A CUDA graph needs
    no host.
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
    """Return the seconds of decoding the operands and multiplying in high precision; the host takes no longer."""
    return sum(_high_on_device(p, costs) for p in products)


def _high_on_device(product: Product, costs: Costs) -> float:
    wide = product.high.itemsize
    rate = costs.bf16_flop_per_s if wide == 2 else costs.fp32_flop_per_s
    launches = (len(product.decodes) + 1) * costs.launch_s
    moved = (_CODE_BYTES + wide) * sum(product.decodes) + wide * product.written
    return launches + moved / costs.bytes_per_s + costs.product(product.m, product.n, product.k, rate, wide)
