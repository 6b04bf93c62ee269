"""Predict which casts run inside of loops, and which are calls of a kernel that reads and writes memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from fxprec.config import Settings
from fxprec.ir.symbolic import stored_dtype
from fxprec.numerics.bits import Bit
from fxprec.numerics.blocks import AnyFormat
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.replay.kernels import Kind

VECTORIZED = frozenset(
    {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32}
)
"""Dtypes of stored tensors that Inductor's C++ can vectorise. Any other dtype makes a whole loop scalar."""


@dataclass(frozen=True)
class CastKernels:
    """The casts of a graph's stored copies, as its device runs them."""

    storage: str = "native"
    are_called: bool = False
    """Whether every cast calls a kernel, which counts statistics while it rounds."""
    has_calls: bool = False
    """Whether the device is a CPU, which calls a kernel for dtypes that its loops cannot vectorise."""

    @classmethod
    def of(cls, settings: Settings, device: torch.device) -> Self:
        """Return the casts of a graph on ``device``."""
        is_cpu = device.type == "cpu"
        return cls(settings.storage, is_cpu and settings.counts_while_rounding, is_cpu)

    def kind(self, fmt: AnyFormat | Bit | None) -> Kind:
        """Return how a copy in ``fmt`` is written, and how it is read back."""
        if not isinstance(fmt, Format) or not self.has_calls:
            return Kind.FUSED
        is_called = self.are_called or stored_dtype(fmt, self.storage) not in VECTORIZED
        return Kind.EXTERN if is_called else Kind.FUSED
