"""Compute convolutions and their gradients as matrix products, for `fxprec.Accumulator`: slowly, in any dimensions.

Each output is one sum over channels and kernel positions. Each element of a weight's gradient is one sum over images
and output positions. So ``multiply`` decides how sums are accumulated. It takes (groups, m, k) and (groups, k, n).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Window:
    """The positions on an image at which a kernel of spatial size ``kernel`` is applied; one number per dimension."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def padding_of_transpose(self, small: Sequence[int], large: Sequence[int]) -> list[tuple[int, int]]:
        """Return the zeros before and after an image of size ``small``, spread by the stride, that give ``large``."""
        pads = []
        for n, out, k, s, p, d in zip(small, large, self.kernel, self.stride, self.padding, self.dilation, strict=True):
            before = d * (k - 1) - p
            pads.append((before, out + d * (k - 1) - ((n - 1) * s + 1) - before))
        return pads


def correlate(x: Tensor, weight: Tensor, window: Window, groups: int, multiply: Multiply) -> Tensor:
    """Return ``conv(x, weight)``: (n, c, ...) and (o, c / groups, ...) give (n, o, ...)."""
    pads = [(p, p) for p in window.padding]
    return _correlate(_padded(x, pads), weight, window.stride, window.dilation, groups, multiply)


def correlate_transposed(
    x: Tensor, weight: Tensor, window: Window, size: Sequence[int], groups: int, multiply: Multiply
) -> Tensor:
    """Return the transpose of `correlate`: (n, o, ...) and (o, c / groups, ...) give (n, c, *size).

    It is a convolution of ``x``, spread by the stride, with the flipped kernel; sums with the zeros between are exact.
    """
    spread = _padded(_spread(x, window.stride), window.padding_of_transpose(x.shape[2:], size))
    spatial = list(range(2, weight.dim()))
    parts = weight.flip(spatial).unflatten(0, (groups, -1)).transpose(1, 2)  # (groups, c / groups, o / groups, ...)
    ones = [1] * len(spatial)
    return _correlate(spread, parts.flatten(0, 1), ones, window.dilation, groups, multiply)


def weight_gradient(x: Tensor, grad: Tensor, window: Window, groups: int, multiply: Multiply) -> Tensor:
    """Return the gradient (o, c / groups, ...) of `correlate`'s weight: (n, c, ...) and (n, o, ...)."""
    pads = [(p, p) for p in window.padding]
    columns = _columns(_padded(x, pads), window.kernel, window.stride, window.dilation, groups)
    rows = grad.unflatten(1, (groups, -1)).transpose(0, 1).transpose(1, 2).flatten(2)  # (groups, o / groups, n * ...)
    found = multiply(rows, columns).flatten(0, 1)
    return found.view(found.shape[0], -1, *window.kernel)


def _correlate(
    x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int, multiply: Multiply
) -> Tensor:
    kernel = weight.shape[2:]
    columns = _columns(x, kernel, stride, dilation, groups)
    parts = weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)
    found = multiply(columns, parts)  # (groups, n * ..., o / groups)
    size = _output_size(x.shape[2:], kernel, stride, dilation)
    return found.permute(1, 0, 2).reshape(x.shape[0], *size, weight.shape[0]).movedim(-1, 1).contiguous()


def _columns(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """Return (groups, n * output positions, c / groups * kernel positions) of a padded image."""
    x = x.contiguous()
    size = _output_size(x.shape[2:], kernel, stride, dilation)
    steps = x.stride()[2:]
    strides = [s * t for s, t in zip(steps, stride, strict=True)], [s * t for s, t in zip(steps, dilation, strict=True)]
    windows = x.as_strided((*x.shape[:2], *size, *kernel), (*x.stride()[:2], *strides[0], *strides[1]))
    by_group: Tensor = windows.unflatten(1, (groups, -1)).transpose(0, 1).movedim(2, 2 + len(kernel))
    rows = x.shape[0] * math.prod(size)
    return by_group.reshape(groups, rows, x.shape[1] // groups * math.prod(kernel))


def _output_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)]


def _padded(x: Tensor, pads: Sequence[tuple[int, int]]) -> Tensor:
    """Pad the image with zeros; a negative number crops."""
    return F.pad(x, [p for pair in reversed(pads) for p in pair])


def _spread(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Insert stride - 1 zeros between neighbours."""
    size = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    found = x.new_zeros(*x.shape[:2], *size)
    places = found
    for dim, s in enumerate(stride, start=2):
        places = places[(slice(None),) * dim + (slice(None, None, s),)]
    places.copy_(x)
    return found
