"""What computing a value again, or keeping it, takes: seconds, by rough rates of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.joint import numel_hint, tensor_of, value
from fxprec.passes.analysis.peak.kernels import Kind, bytes_of, flops_of, kind_of
from fxprec.passes.analysis.peak.step import Step


@dataclass(frozen=True)
class Rates:
    """Of one device; only their ratio decides."""

    bytes_per_s: float
    flop_per_s: float

    @classmethod
    def of(cls, device: torch.device) -> Rates:
        gpu = gemm_costs.gpu_of(device)
        if gpu is None:
            return _CPU
        costs = gemm_costs.costs_of(gpu)
        return cls(costs.bytes_per_s, costs.bf16_flop_per_s)

    def again(self, node: Node) -> float:
        """Return the seconds of running a node once more."""
        kind = kind_of(node)
        if kind in (Kind.FREE, Kind.VIEW, Kind.PIECE):
            return 0.0
        moved = bytes_of(node) + (0 if kind is Kind.FUSED else sum(map(bytes_of, node.all_input_nodes)))
        return max(moved / self.bytes_per_s, flops_of(node) / self.flop_per_s)

    def step(self, step: Step) -> float:
        """Return the seconds of running both halves once."""
        return sum(map(self.again, (*step.forward, *step.backward)))

    def keeping(self, node: Node, size: int) -> float:
        """Return the seconds of writing and reading ``size`` bytes; a kernel's own result is written anyway."""
        passes = 2 if kind_of(node) is Kind.FUSED else 1
        return passes * size / self.bytes_per_s

    def rounding(self, node: Node) -> float:
        """Return the seconds of encoding and decoding, and as many again: of equals, what rounds nothing wins."""
        val = value(node)
        return 0.0 if val is None else 2 * numel_hint(tensor_of(node)) * _HIGH_BYTES / self.bytes_per_s


_HIGH_BYTES = 2
# One core with AVX-512 and bf16 instructions; what runs on two cores has both twice.
_CPU = Rates(bytes_per_s=1e10, flop_per_s=1.2e11)
