"""GEMMs whose products and partial sums are rounded to formats of their own, for option ``accumulator``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, Flags, Size, Sizes


def _matmul(a: torch.Tensor, b: torch.Tensor, *sums: object) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)


@dataclass(frozen=True)
class Matmul(Call, op="matmul", fake=_matmul):
    a: Node
    b: Node
    products: str
    sums: str
    kahan: bool
    chunk: int


def _convolution(x: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    *window, channels_last = options[:7]
    shape = torch.ops.aten.convolution(x, weight, None, *window).shape
    return _in_layout(x.new_empty(shape, dtype=torch.float32), channels_last)


@dataclass(frozen=True)
class Convolution(Call, op="convolution", fake=_convolution):
    x: Node
    weight: Node
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: Size
    channels_last: bool
    products: str
    sums: str
    kahan: bool
    chunk: int


def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    channels_last, mask = options[6:8]
    wanted = (t if asked else t.new_empty(0) for t, asked in zip((x, weight), mask, strict=True))
    first, second = (_in_layout(t.new_empty(t.shape, dtype=torch.float32), channels_last) for t in wanted)
    return first, second


@dataclass(frozen=True)
class ConvolutionBackward(Call, op="convolution_backward", fake=_convolution_backward, returns="(Tensor, Tensor)"):
    grad: Node
    x: Node
    weight: Node
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: Size
    channels_last: bool
    mask: Flags
    products: str
    sums: str
    kahan: bool
    chunk: int


def _in_layout(t: torch.Tensor, channels_last: bool) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if channels_last and t.dim() == 4 else t


MATMUL = Matmul.target
CONVOLUTION = Convolution.target
CONVOLUTION_BACKWARD = ConvolutionBackward.target
