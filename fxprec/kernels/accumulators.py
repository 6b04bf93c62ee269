"""GEMMs whose products and partial sums are rounded to chosen formats, for option ``accumulator``."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, FakeCall, Flags, Size, Sizes


def _product(call: FakeCall) -> object:
    shape = (*call.a.shape[:-1], call.b.shape[-1])
    return call.a.new_empty(shape, dtype=torch.float32)


class Matmul(Call, op="matmul", fake=_product):
    """Multiply (..., k) by (k, n); products are rounded to one format, sums, perhaps in chunks, to another."""

    a: Node
    b: Node
    products: str
    sums: str
    kahan: bool
    chunk: int


def _in_layout(t: torch.Tensor, channels_last: bool) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if channels_last and t.dim() == 4 else t


def _convolution(call: FakeCall) -> torch.Tensor:
    window = call.stride, call.padding, call.dilation, call.transposed, call.output_padding, call.groups
    shape = torch.ops.aten.convolution(call.x, call.weight, None, *window).shape
    return _in_layout(call.x.new_empty(shape, dtype=torch.float32), call.channels_last)


class _Convolves(Call):
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


class Convolution(_Convolves, op="convolution", fake=_convolution):
    """Convolve without bias; products and sums are rounded as in `Matmul`."""


def _convolution_backward(call: FakeCall) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = (t if asked else t.new_empty(0) for t, asked in zip((call.x, call.weight), call.mask, strict=True))
    first, second = (_in_layout(t.new_empty(t.shape, dtype=torch.float32), call.channels_last) for t in wanted)
    return first, second


class ConvolutionBackward(
    _Convolves, op="convolution_backward", fake=_convolution_backward, returns="(Tensor, Tensor)"
):
    """Compute the gradients of input and weight that ``mask`` selects, rounded as in `Matmul`."""

    grad: Node
    mask: Flags


MATMUL = Matmul.target
CONVOLUTION = Convolution.target
CONVOLUTION_BACKWARD = ConvolutionBackward.target
