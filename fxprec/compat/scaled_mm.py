"""Multiply operands in block formats with `torch.nn.functional.scaled_mm` and `scaled_grouped_mm`, as in torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

OLDEST = (10, 0)
"""Compute capability from which tensor cores multiply operands in block formats."""


@dataclass(frozen=True)
class Scaling:
    """A kind of operands that `F.scaled_mm` multiplies."""

    element: torch.dtype
    """The dtype as which torch views the bytes of codes; float4 has two codes per byte, the first in the low bits."""
    scale: torch.dtype
    block: int
    has_whole: bool
    """Whether the whole tensor also has a float32 scale."""


MX = Scaling(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32, has_whole=False)
NV = Scaling(torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16, has_whole=True)
NV_ONE_SCALE = Scaling(torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16, has_whole=False)


def multiplies_blocks(device: torch.device) -> bool:
    """Return whether a device's tensor cores multiply operands in block formats."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= OLDEST


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of `F.scaled_mm`, or of `F.scaled_grouped_mm` if there are groups."""

    mat_a: Tensor
    """(M, K), row-major; (M, K / 2) with two codes per byte."""
    mat_b: Tensor
    """(K, N) or (G, K, N), column-major; K / 2 with two codes per byte."""
    scale_a: list[Tensor]
    scale_b: list[Tensor]
    recipe: list[F.ScalingType]
    """The scaling of each operand; equal for both."""
    swizzle: list[F.SwizzleType]
    offs: Tensor | None = None
    """The ends of the groups of tokens, (G,) int32: of rows of ``mat_a``, or of elements along the summed dimension."""

    @classmethod
    def of(
        cls,
        scaling: Scaling,
        codes: tuple[Tensor, Tensor],
        scales: tuple[Tensor, Tensor],
        wholes: tuple[Tensor | None, Tensor | None],
        offs: Tensor | None = None,
    ) -> Arguments:
        """Return the arguments for codes (M, K) and (.., N, K) as bytes, swizzled bytes of scales, and (1,) float32."""
        block = {16: F.ScalingType.BlockWise1x16, 32: F.ScalingType.BlockWise1x32}[scaling.block]
        more = ([F.ScalingType.TensorWise], [F.SwizzleType.NO_SWIZZLE]) if scaling.has_whole else ([], [])
        a, b = (c.view(scaling.element) for c in codes)
        scale_a, scale_b = (
            [scale.view(scaling.scale), *([] if whole is None else [whole if offs is None else _for_each(offs, whole)])]
            for scale, whole in zip(scales, wholes, strict=True)
        )
        swizzle = [F.SwizzleType.SWIZZLE_32_4_4, *more[1]]
        ends = None if offs is None else offs.int()
        return cls(a, b.mT, scale_a, scale_b, [block, *more[0]], swizzle, ends)

    def multiply(self, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the product, on a GPU of `OLDEST` or later. torch leaves tokens beyond the last group unwritten."""
        scales = self.scale_a, self.recipe, self.scale_b, self.recipe, self.swizzle, self.swizzle
        if self.offs is None:
            return F.scaled_mm(self.mat_a, self.mat_b, *scales, bias=bias, output_dtype=dtype)
        multiply: Callable[..., Tensor] = F.scaled_grouped_mm  # type: ignore[attr-defined]  # torch's stub leaves it out
        return multiply(self.mat_a, self.mat_b, *scales, bias=bias, offs=self.offs, output_dtype=dtype)


def _for_each(offs: Tensor, whole: Tensor) -> Tensor:
    """Return one scale for each group; all are the tensor's."""
    return whole.expand(offs.shape[0]).contiguous()
