"""Estimate the seconds to recompute a value or to keep it, from rough rates of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.joint import numel_hint, tensor_of
from fxprec.passes.analysis.replay.kernels import LIGHT, Kind, flops_of, kind_of, result_bytes
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.analysis.ways import Form


@dataclass(frozen=True)
class Rates:
    """Rates of one device; only their ratios matter."""

    bytes_per_s: float
    flop_per_s: float
    host_bytes_per_s: float = 5e9
    """Rate of copies to host memory, and of copies back."""
    call_s: float = 1e-6
    """Seconds of the device between a kernel and a copy to host memory that follows it."""
    light: float = 1.0
    """Seconds of a light operator in a loop, over those of moving its result."""

    @classmethod
    def of(cls, device: torch.device) -> Rates:
        """Return the rates of a GPU that `gemm_costs` knows, or the rates of one CPU core."""
        gpu = gemm_costs.gpu_of(device)
        if gpu is None:
            return _CPU
        costs = gemm_costs.costs_of(gpu)
        return cls(costs.bytes_per_s, costs.bf16_flop_per_s, costs.host_bytes_per_s, call_s=costs.launch_s)

    def running(self, node: Node) -> float:
        """Return the seconds of running a node.

        In a loop, a function such as ``exp`` takes about as long as its result takes to be moved, and a light operator
        far less. On one core with AVX-512, in nanoseconds for a float32: ``add`` 0.01, ``sqrt`` and ``div`` 0.02,
        ``exp`` 0.2, ``erf`` 0.3, ``tanh`` 1.0; moving it 0.4.
        """
        kind = kind_of(node)
        if kind in (Kind.FREE, Kind.VIEW, Kind.PIECE):
            return 0.0
        if kind is Kind.FUSED:
            return result_bytes(node) / self.bytes_per_s * (self.light if node.target in LIGHT else 1.0)
        moved = result_bytes(node) + sum(map(result_bytes, node.all_input_nodes))
        return max(moved / self.bytes_per_s, flops_of(node) / self.flop_per_s)

    def step(self, step: Step) -> float:
        """Return the seconds of running both halves once."""
        return sum(map(self.running, (*step.forward, *step.backward)))

    def writing(self, size: int) -> float:
        """Return the seconds of writing and reading ``size`` bytes."""
        return 2 * size / self.bytes_per_s

    def keeping(self, size: int, *, is_there: bool) -> float:
        """Return the seconds of writing and reading ``size`` bytes; of reading them if they are in memory anyway."""
        return self.writing(size) / 2 if is_there else self.writing(size)

    def moving(self, size: int) -> float:
        """Return the seconds of copying ``size`` bytes to host memory and back, if nothing else runs meanwhile."""
        return 2 * (size / self.host_bytes_per_s + self.call_s)

    def encoding(self, node: Node, form: Form) -> float:
        """Return the seconds of encoding and decoding, plus a penalty in proportion to the form's error."""
        return form.passes * numel_hint(tensor_of(node)) * _HIGH_BYTES / self.bytes_per_s


_HIGH_BYTES = 2
# One core with AVX-512 and bf16 instructions; on two cores both rates double.
_CPU = Rates(bytes_per_s=1e10, flop_per_s=1.2e11)
