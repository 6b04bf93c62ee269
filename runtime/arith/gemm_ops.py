"""Implement ``fxprec::matmul`` and the two convolution operators: GEMMs with an accumulator of a chosen format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxprec.kernels.accumulators import Convolution, ConvolutionBackward, Matmul
from fxprec.numerics.formats import parse
from fxprec.runtime.arith import functions
from fxprec.runtime.arith.convolution import Multiply, Window, correlate, correlate_transposed, weight_gradient
from fxprec.runtime.arith.spec import Spec


def _multiply(products: str, sums: str, kahan: bool, chunk: int) -> Multiply:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return functions.multiply(a.float(), b.float(), Spec(parse(products), parse(sums), kahan, chunk))

    return multiply


def matmul(a: Tensor, b: Tensor, products: str, sums: str, kahan: bool, chunk: int) -> Tensor:
    """Multiply (m, k) by (k, n); products are rounded to one format, sums to another."""
    return _multiply(products, sums, kahan, chunk)(a, b)


def convolution(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int, channels_last: bool,
    products: str, sums: str, kahan: bool, chunk: int,
) -> Tensor:  # fmt: skip
    """Convolve as `torch.convolution` without bias, with every product and sum rounded."""
    multiply = _multiply(products, sums, kahan, chunk)
    window = Window(weight.shape[2:], stride, padding, dilation)
    if not transposed:
        return _in_layout(correlate(x, weight, window, groups, multiply), channels_last)
    size = [
        (n - 1) * s - 2 * p + d * (k - 1) + extra + 1
        for n, s, p, d, k, extra in zip(
            x.shape[2:], stride, padding, dilation, weight.shape[2:], output_padding, strict=True
        )
    ]
    return _in_layout(correlate_transposed(x, weight, window, size, groups, multiply), channels_last)


def convolution_backward(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int, channels_last: bool,
    products: str, sums: str, kahan: bool, chunk: int, grad: Tensor, mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of input and weight that ``mask`` selects; the others are empty."""
    multiply = _multiply(products, sums, kahan, chunk)
    window = Window(weight.shape[2:], stride, padding, dilation)
    of_x, of_weight = x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
    if mask[0] and transposed:
        of_x = correlate(grad, weight, window, groups, multiply)
    elif mask[0]:
        of_x = correlate_transposed(grad, weight, window, x.shape[2:], groups, multiply)
    if mask[1]:
        image, other = (grad, x) if transposed else (x, grad)
        of_weight = weight_gradient(image, other, window, groups, multiply)
    return _in_layout(of_x, channels_last), _in_layout(of_weight, channels_last)


def _in_layout(t: Tensor, channels_last: bool) -> Tensor:
    wanted = torch.channels_last if channels_last and t.dim() == 4 else torch.contiguous_format
    return t.contiguous(memory_format=wanted)


Matmul.implement(matmul)
Convolution.implement(convolution)
ConvolutionBackward.implement(convolution_backward)
