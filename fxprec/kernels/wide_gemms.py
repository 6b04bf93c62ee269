"""GEMMs of 16-bit tensors on a CPU without instructions for them: ATen's schemas, computed in float32 by blocks.

``fxprec_wide::mm(Tensor self, Tensor mat2) -> Tensor`` is ``aten::mm`` of bfloat16 or float16 tensors. It converts each
block of the operands to float32, multiplies there, and rounds each result once. Operands and results stay in 16 bits,
as on a CPU that has the instructions. Only one block at a time has a float32 copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxprec.ir.operators import TABLE, Trait

aten = torch.ops.aten
NAMESPACE = "fxprec_wide"
BLOCK = 512
"""Rows and columns of a matrix of 1 MiB in float32: the most of each factor, and of the product, that `tile` allows.

By blocks of 256 a product takes 8 % longer (seven shapes of a transformer, AVX2, one thread of a busy machine).
"""
ELEMENTS = 1 << 17
"""Elements of one operand that attention and convolutions convert at once; at least a head or an image."""
_library = torch.library.Library(NAMESPACE, "DEF")


def tile(m: int, k: int, n: int) -> tuple[int, int, int]:
    """Return the rows, depth and columns of the blocks in which (m, k) is multiplied by (k, n).

    Of the shapes that fit, one with the fewest elements converted. If the depth is all of ``k``, a panel of the second
    factor is converted once for all rows. A product takes 1.06 of its time in float32, and 1.09 in blocks of 512 (the
    median of 16 shapes, one thread, AVX2).
    """

    def cost(shape: tuple[int, int, int]) -> tuple[int, int]:
        down, deep, across = (-(-size // part) for size, part in zip((m, k, n), shape, strict=True))
        return m * k * across + k * n * (1 if deep == 1 else down), down * deep * across

    m, k, n = max(m, 1), max(k, 1), max(n, 1)
    if max(m, k, n) <= BLOCK:
        return m, k, n
    return min(_shapes(m, k, n), key=cost)


def _shapes(m: int, k: int, n: int) -> Iterator[tuple[int, int, int]]:
    for width in (BLOCK, BLOCK // 2, 2 * BLOCK):
        columns = min(n, width)
        rows = _fitting(m, columns)
        yield rows, _fitting(k, max(rows, columns)), columns
        if k <= 2 * BLOCK and k * columns <= BLOCK * BLOCK:
            yield _fitting(m, max(k, columns)), k, columns


def _fitting(size: int, other: int) -> int:
    """Return the most of ``size`` that fits beside ``other``; a part of it is a multiple of a vector's length."""
    return min(size, 2 * BLOCK, BLOCK * BLOCK // other // (BLOCK // 8) * (BLOCK // 8))


def images_at_once(weight: int) -> int:
    """Return how many elements of images a convolution converts at once, given those of its weight.

    The weight is converted whole, and a library reorders it for each call. With half as many elements as the weight
    has, a convolution of 512 channels takes 1.11 of its time in float32, and 1.00 in backward; with `ELEMENTS` it takes
    1.20 and 1.12 (32 images of 4 x 4, one thread, AVX2).
    """
    return max(ELEMENTS, weight // 2)


def _declare(operator: Any) -> Any:
    """Define an operator of the same name and schema; return it."""
    name = operator._schema.name.removeprefix("aten::")
    _library.define(str(operator._schema).removeprefix("aten::"))
    torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES.get(operator, partial(_as_in_aten, operator)))
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _as_in_aten(operator: OpOverload, *args: object, **options: object) -> object:
    return operator(*args, **options)


def convolution_layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the layout of a convolution's result: channels-last if its input or its weight is.

    ATen's own choice depends on the processor.
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (x, weight)):
        return last
    return torch.contiguous_format


def _convolution(x: Tensor, weight: Tensor, *options: object) -> Tensor:
    out: Tensor = aten.convolution.default(x, weight, *options)
    return torch.empty_like(out, memory_format=convolution_layout(x, weight))


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor | None, ...]:
    layout, mask = convolution_layout(x, weight), options[-1]
    of_x = torch.empty_like(x, memory_format=layout) if mask[0] else None
    # A weight that is passed for its shape alone may have another dtype (casts/two_gradients.py).
    of_weight = torch.empty_like(weight, dtype=gradient.dtype, memory_format=layout) if mask[1] else None
    return of_x, of_weight, gradient.new_empty(gradient.shape[1]) if mask[2] else None


_FAKES: Mapping[OpOverload, Callable[..., object]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}


WIDE: Mapping[Any, OpOverload] = MappingProxyType(
    {operator: _declare(operator) for operator, spec in TABLE.items() if Trait.WIDE in spec.traits}
)
"""ATen's operator -> fxprec's operator that computes it in float32."""
