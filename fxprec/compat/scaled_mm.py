"""torch's products of operands in blocks: `torch.nn.functional.scaled_mm` as torch 2.13 and 2.14 have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

OLDEST = (10, 0)
"""Compute capability from which tensor cores multiply operands in blocks."""


@dataclass(frozen=True)
class Scaling:
    """One kind of operands that `F.scaled_mm` multiplies."""

    element: torch.dtype
    """As torch views bytes of codes; float4 has two codes a byte, the first in the lower bits."""
    scale: torch.dtype
    block: int
    has_whole: bool
    """Whether a float32 scales the whole tensor too."""


MX = Scaling(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32, has_whole=False)
NV = Scaling(torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16, has_whole=True)
NV_ONE_SCALE = Scaling(torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16, has_whole=False)


def multiplies_blocks(device: torch.device) -> bool:
    """Say whether a device's tensor cores multiply operands in blocks."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= OLDEST


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of `F.scaled_mm`."""

    mat_a: Tensor
    """(M, K), row-major; of two codes a byte (M, K / 2)."""
    mat_b: Tensor
    """(K, N), column-major; (K / 2, N)."""
    scale_a: list[Tensor]
    scale_b: list[Tensor]
    recipe: list[F.ScalingType]
    """Scaling of both operands."""
    swizzle: list[F.SwizzleType]

    @classmethod
    def of(
        cls,
        scaling: Scaling,
        codes: tuple[Tensor, Tensor],
        scales: tuple[Tensor, Tensor],
        wholes: tuple[Tensor | None, Tensor | None],
    ) -> Arguments:
        """Return the arguments for bytes of codes (M, K) and (N, K), swizzled bytes of scales, and (1,) float32."""
        block = {16: F.ScalingType.BlockWise1x16, 32: F.ScalingType.BlockWise1x32}[scaling.block]
        more = ([F.ScalingType.TensorWise], [F.SwizzleType.NO_SWIZZLE]) if scaling.has_whole else ([], [])
        a, b = (c.view(scaling.element) for c in codes)
        scale_a, scale_b = (
            [scale.view(scaling.scale), *([] if whole is None else [whole])]
            for scale, whole in zip(scales, wholes, strict=True)
        )
        return cls(a, b.t(), scale_a, scale_b, [block, *more[0]], [F.SwizzleType.SWIZZLE_32_4_4, *more[1]])

    def multiply(self, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the product (M, N), on a GPU of `OLDEST` or later."""
        return F.scaled_mm(
            self.mat_a,
            self.mat_b,
            self.scale_a,
            self.recipe,
            self.scale_b,
            self.recipe,
            self.swizzle,
            self.swizzle,
            bias=bias,
            output_dtype=dtype,
        )
