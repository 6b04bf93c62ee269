"""Predict the bytes that a library's kernel allocates for itself on a CPU: part of the peak, but in no graph.

The figures are from the allocator's events of torch 2.13 with oneDNN on a CPU with AVX-512. Predictions are within a
tenth, or above. Nothing is known about GPUs: cuBLAS and cuDNN choose by device and version.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxprec.kernels.wide_gemms import ELEMENTS, NAMESPACE, convolution_layout, images_at_once, tile
from fxprec.passes.analysis.joint import bytes_of, dim_hint, numel_hint

_GEMMS = ("mm", "addmm", "bmm", "baddbmm")
_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_CONVOLUTION, _CONVOLUTION_BACKWARD = 16_384, 20_992  # bytes of one thread
_CHANNELS = 16  # channels of one block
_OUTPUTS = 24  # output channels of one block of a float32 weight on a CPU with AVX2, which oneDNN fills up with zeros
_SMALL, _ROWS_PACKED = 16**3, 256  # multiplications up to which ATen runs no oneDNN; rows of a 16-bit GEMM's panel
_ROWS = ((768, 256), (192, 64), (0, 32))  # (least number of queries, queries of one block)
_KEYS = 512  # keys of one block


def workspace(name: str, operands: Sequence[Tensor], threads: int) -> int:
    """Return the bytes that an operator, ``"aten::mm"``, allocates beside its results; 0 if unknown."""
    namespace, _, name = name.partition("::")
    if not operands or operands[0].device.type != "cpu":
        return 0
    if namespace == NAMESPACE:
        return _widened(name, operands, threads)
    return _of_aten(name, operands, threads) if namespace == "aten" else 0


def _of_aten(name: str, operands: Sequence[Tensor], threads: int) -> int:
    if name == "convolution":
        x, weight = operands[:2]
        return _convolution(x, weight, numel_hint(x), _results(x, weight))
    if name == "convolution_backward":
        gradient, x, weight = operands[:3]
        if gradient.dtype.itemsize == 2:
            return threads * _convolution_backward_in_16_bits(gradient, x, weight)
        return _convolution_backward(gradient, x, weight, numel_hint(gradient), numel_hint(x))
    if name in (_FORWARD, _BACKWARD):
        return _attention(operands[0], operands[1 if name == _FORWARD else 2], threads, is_backward=name == _BACKWARD)
    if name in _GEMMS and operands[-1].dtype.itemsize == 2:
        return _gemm(*operands[-2:], threads=threads)
    return 0


def _gemm(a: Tensor, b: Tensor, *, threads: int) -> int:
    """Return the bytes of the panels that oneDNN packs in each thread, and of copies of batches with gaps."""
    m, k, n = (dim_hint(size) for size in (a.shape[-2], a.shape[-1], b.shape[-1]))
    if m * k * n <= _SMALL:
        return 0
    rows, k = min(m, _ROWS_PACKED), -(-k // 32) * 32
    result = 4 * rows * min(n, 1_024)
    if _is_transposed(a):
        panels = result + 1_088 * rows + 66_688 if k > 512 else 256 * rows + (160 + 2 * rows) * k + 1_152
    elif m >= 1_024 and k >= 4_096:
        panels = result + 672_896
    else:
        panels = 256 * rows + 128 * min(k, 512) + 1_024 + (65_536 if k >= 2_048 else 0)
    copies = sum(bytes_of(x) for x in (a, b) if x.dim() == 3 and not _has_no_gaps(x))
    return threads * panels + copies


def _is_transposed(x: Tensor) -> bool:
    return x.stride()[-2] == 1 and x.stride()[-1] != 1


def _has_no_gaps(x: Tensor) -> bool:
    """Return whether a batch of matrices, transposed or not, is contiguous; oneDNN gets a copy of any other batch."""
    return x.is_contiguous() or x.transpose(-1, -2).is_contiguous()


def _widened(name: str, operands: Sequence[Tensor], threads: int) -> int:
    """Return the bytes of `fxprec_wide`: float32 copies of a piece, and ATen's workspace for the piece in float32."""
    if name in _GEMMS:
        return _product(*operands[-2:])
    wide = [torch.empty_like(x, dtype=torch.float32) for x in operands[:3]]
    if name == "convolution":
        x, weight = wide[:2]
        at_once = images_at_once(numel_hint(weight))
        images, results = _piece(x, at_once), _result(x, weight, at_once)
        return 4 * (images + results) + bytes_of(weight) + _convolution(x, weight, images, results)
    if name == "convolution_backward":
        gradient, x, weight = wide
        at_once = images_at_once(numel_hint(weight))
        gradients, images = _piece(gradient, at_once), _piece(x, at_once)
        # Beside the weight its gradient, of a piece and in sum, less the result, which is made at the end.
        weights = 3 * bytes_of(weight) - bytes_of(operands[2])
        beside = _convolution_backward(gradient, x, weight, gradients, images)
        return 4 * (gradients + 2 * images) + weights + beside
    if name in (_FORWARD, _BACKWARD):
        return 4 * _heads(operands[1]) * (4 if name == _FORWARD else 8) + _of_aten(name, wide, threads)
    return 0


def _product(a: Tensor, b: Tensor) -> int:
    """Return the bytes of a block of each factor and of their product, or of several small matrices of a batch."""
    sizes = [dim_hint(size) for size in (a.shape[-2], a.shape[-1], b.shape[-1])]
    m, k, n = map(min, sizes, tile(*sizes))
    elements, batch = m * k + k * n + m * n, dim_hint(a.shape[0]) if a.dim() == 3 else 1
    largest = max(dim_hint(x) * dim_hint(y) for x, y in (a.shape[-2:], b.shape[-2:], (a.shape[-2], b.shape[-1])))
    return 4 * elements * max(1, min(batch, ELEMENTS // max(largest, 1)))


def _piece(x: Tensor, at_once: int) -> int:
    """Return the elements of the images that are converted at once."""
    image = numel_hint(x) // max(dim_hint(x.shape[0]), 1)
    return min(numel_hint(x), max(at_once, image))


def _result(x: Tensor, weight: Tensor, at_once: int) -> int:
    """Return the elements of the images that a convolution computes at once, if each channel is no larger than in x."""
    return min(at_once, max(ELEMENTS, _results(x, weight)))


def _results(x: Tensor, weight: Tensor) -> int:
    """Return the elements of a convolution's result, if each channel is no larger than in x."""
    return numel_hint(x) * max(dim_hint(n) for n in weight.shape[:2]) // max(dim_hint(x.shape[1]), 1)


def _heads(query: Tensor) -> int:
    """Return the elements of the heads that are converted at once."""
    head = dim_hint(query.shape[-2]) * dim_hint(query.shape[-1])
    return min(numel_hint(query), max(ELEMENTS, head))


def _convolution(x: Tensor, weight: Tensor, images: int, results: int) -> int:
    """Return the bytes of the reordered weight, and in float32 of images that do not lie channels-last.

    ``images``, ``results``: elements of x and of the result that one call reads and writes. A weight of one pixel is
    taken to be applied to each: then float32 has no copy.
    """
    if weight.dtype.itemsize == 2:
        return bytes_of(weight) + _CONVOLUTION
    if _is_one_pixel(weight):
        return 0
    if not _is_channels_last(x, weight):  # copies in blocks of channels; the result's last
        return max(4 * images + bytes_of(weight), 4 * results)
    outputs = max(dim_hint(weight.shape[0]), 1)
    return bytes_of(weight) // outputs * (-(-outputs // _OUTPUTS) * _OUTPUTS) + _CONVOLUTION


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, gradients: int, images: int) -> int:
    """Return the bytes of two copies of the weight's gradient, or of images that do not lie channels-last: float32.

    ``gradients``, ``images``: elements of the gradient and of x that one call reads.
    """
    is_strided = any(
        dim_hint(of_result) < dim_hint(n) for of_result, n in zip(gradient.shape[2:], x.shape[2:], strict=True)
    )
    if _is_one_pixel(weight) and not is_strided:
        return 0
    if _is_channels_last(x, weight):
        return 2 * bytes_of(weight) + _CONVOLUTION_BACKWARD
    return max(4 * images + 4 * (images if is_strided else gradients), bytes_of(weight))


def _is_one_pixel(weight: Tensor) -> bool:
    return all(dim_hint(n) == 1 for n in weight.shape[2:])


def _is_channels_last(x: Tensor, weight: Tensor) -> bool:
    return convolution_layout(x, weight) is not torch.contiguous_format


def _convolution_backward_in_16_bits(gradient: Tensor, x: Tensor, weight: Tensor) -> int:
    """Return the bytes of one thread: two copies of the weight's gradient, and two images.

    ``weight`` only tells the gradient's shape; it may be the float32 parameter (`passes.casts.two_gradients`).
    """
    channels = max(dim_hint(gradient.shape[1]), 1)
    padded = bytes_of(gradient) * (-(-channels // _CHANNELS) * _CHANNELS) // channels
    images = (padded + bytes_of(x)) // max(dim_hint(x.shape[0]), 1)
    return 2 * numel_hint(weight) * gradient.dtype.itemsize + images + _CONVOLUTION_BACKWARD


def _attention(query: Tensor, key: Tensor, threads: int, *, is_backward: bool) -> int:
    """Return the bytes of each thread's block of scores, in float32, and also in 16 bits if the query has 16 bits.

    Backward has two such blocks. It also copies the result's gradient, here passed as ``query``, unless the heads of
    one token are adjacent in memory.
    """
    queries, keys, width = (dim_hint(n) for n in (query.shape[-2], key.shape[-2], query.shape[-1]))
    rows, columns = next(n for least, n in _ROWS if queries >= least), min(_KEYS, keys)
    scores = rows * columns * (6 if query.dtype.itemsize == 2 else 4)
    if not is_backward:
        return threads * (scores + rows * (4 * width + 8))
    is_packed = query.dtype.itemsize == 2  # for GEMMs of 16 bits
    a_thread = 2 * scores + 4 * rows + (4 * (rows + columns) * (min(width, 64) + 24) if is_packed else 0)
    copied = 0 if query.transpose(1, 2).is_contiguous() else bytes_of(query)
    return copied + threads * a_thread
