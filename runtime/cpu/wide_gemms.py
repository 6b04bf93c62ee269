"""Implement ``fxprec_wide`` on CPUs: 16-bit GEMMs in float32, one block of the operands at a time.

Blocks fit a core's cache, so converting them takes a twentieth of the time to multiply them. torch's own kernels for
16-bit operands convert element by element and take 40 to 100 times as long as float32 (AVX2, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxprec.kernels.wide_gemms import ELEMENTS, NAMESPACE, WIDE, convolution_layout, images_at_once, tile

aten = torch.ops.aten


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, (m, k) by (k, n), summed in float32 and rounded once."""
    return addmm(a.new_zeros(()), a, b, beta=0)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta * bias + alpha * (a @ b)``, summed in float32 and rounded once. With ``beta`` 0 no bias is read."""
    out = a.new_empty(a.shape[0], b.shape[1])
    for rows, columns, product in _blocks(a, b):
        out[rows, columns] = _scaled_sum(_part(bias, rows, columns), product, beta, alpha)
        del product  # freed before the next is allocated
    return out


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of (batch, m, k) by (batch, k, n)."""
    return baddbmm(a.new_zeros(()), a, b, beta=0)


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta * bias + alpha * (a @ b)`` for batches (b, m, k) by (b, k, n), as `addmm`."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    bias = bias.expand(out.shape)
    for i in _pieces(a.shape[0], max(a[:1].numel(), b[:1].numel(), out[:1].numel())):
        if i.stop - i.start > 1:
            out[i] = _scaled_sum(bias[i], torch.bmm(a[i].float(), b[i].float()), beta, alpha)
        else:
            out[i.start] = addmm(bias[i.start], a[i.start], b[i.start], beta=beta, alpha=alpha)
    return out


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: object) -> Tensor:
    """Return the convolution of ``x`` (batch, channels, ...), some images at a time."""
    shape = _promised(aten.convolution.default, x, weight, bias, *options).shape
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=convolution_layout(x, weight))
    wide_weight, wide_bias = weight.float(), None if bias is None else bias.float()
    for i in _pieces(x.shape[0], max(x[:1].numel(), out[:1].numel()), images_at_once(weight.numel())):
        out[i] = aten.convolution.default(x[i].float(), wide_weight, wide_bias, *options)
    return out


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of ``x``, ``weight`` and the bias; the last two are summed over images in float32."""
    layout, mask = convolution_layout(x, weight), options[-1]
    of_x = torch.empty_like(x, memory_format=layout) if mask[0] else None
    of_weight = torch.zeros_like(weight, dtype=torch.float32, memory_format=layout) if mask[1] else None
    of_bias = x.new_zeros(gradient.shape[1], dtype=torch.float32) if mask[2] else None
    wide_weight = weight.float()
    for i in _pieces(x.shape[0], max(x[:1].numel(), gradient[:1].numel()), images_at_once(weight.numel())):
        found = aten.convolution_backward.default(gradient[i].float(), x[i].float(), wide_weight, bias_sizes, *options)
        for total, new in zip((of_weight, of_bias), found[1:], strict=True):
            if total is not None:
                total.add_(new)
        if of_x is not None:
            of_x[i] = found[0]
        del found, new  # freed before the next results are allocated
    return of_x, _rounded(of_weight, x.dtype), _rounded(of_bias, x.dtype)


def _rounded(total: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if total is None else total.to(dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Return the result (batch, heads, tokens, width) and the logarithms of sums, some heads at a time."""
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    rest: dict[str, object] = {"attn_mask": attn_mask, "scale": scale}
    results = _empty_results(operator, query, key, value, dropout_p, is_causal, **rest)
    for heads in _heads(query):
        factors = (heads(x) for x in (query, key, value))
        heads.store(results, operator(*factors, dropout_p, is_causal, attn_mask=heads(attn_mask), scale=scale))
    return results


def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, some heads at a time."""
    operator = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    tensors, rest = (gradient, query, key, value, out, logsumexp), {"attn_mask": attn_mask, "scale": scale}
    results = _empty_results(operator, *tensors, dropout_p, is_causal, **rest)
    for heads in _heads(query):
        found = operator(*map(heads, tensors), dropout_p, is_causal, attn_mask=heads(attn_mask), scale=scale)
        heads.store(results, found)
        del found  # freed before the next results are allocated
    return results


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Iterate over the blocks of ``a @ b`` in float32, each with its rows and columns."""
    (m, k), n = a.shape, b.shape[1]
    height, depth, width = tile(m, k, n)
    for columns in _slices(n, width):
        panel = b[:, columns].float() if depth >= k else None
        for rows in _slices(m, height):
            yield rows, columns, _sum(a[rows], b[:, columns], depth) if panel is None else a[rows].float() @ panel


def _sum(a: Tensor, b: Tensor, depth: int) -> Tensor:
    """Return ``a @ b`` in float32, ``depth`` of their common dimension at a time."""
    total: Tensor | None = None
    for k in _slices(a.shape[1], depth):
        x, y = a[:, k].float(), b[k].float()
        total = x @ y if total is None else total.addmm_(x, y)
        del x, y  # freed before the next copies are allocated
    assert total is not None, "an empty dimension is no deeper than a panel"
    return total


def _scaled_sum(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    scaled = product if alpha == 1 else product.mul_(alpha)
    return scaled if beta == 0 else scaled.add_(bias.float(), alpha=beta)  # ATen does not read the bias if beta is 0


def _part(bias: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return the bias of a block; broadcast dimensions keep their size of 1."""
    parts = zip((rows, columns)[2 - bias.dim() :], bias.shape, strict=True)
    return bias[tuple(part if size > 1 else slice(None) for part, size in parts)]


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(i, min(i + step, size)) for i in range(0, size, step))


def _pieces(count: int, elements: int, at_once: int | None = None) -> Iterator[slice]:
    """Iterate over slices of ``count`` items of ``elements`` each; a slice has as many as may be converted at once."""
    return _slices(count, max(1, (ELEMENTS if at_once is None else at_once) // max(elements, 1)))


class _Heads:
    """Some heads of some batches of (batch, heads, ...) tensors, read in float32."""

    def __init__(self, batches: slice, heads: slice) -> None:
        self.index = (batches, heads)

    def of(self, x: Tensor) -> Tensor:
        """Return the view of these heads. A dimension of size 1 is broadcast; a mask may lack both dimensions."""
        if x.dim() < 3:
            return x
        return x[tuple(i if size > 1 else slice(None) for i, size in zip(self.index, x.shape, strict=False))]

    def __call__(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.of(x).float()

    def store(self, results: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        for result, new in zip(results, found, strict=True):
            self.of(result).copy_(new)


def _heads(query: Tensor) -> Iterator[_Heads]:
    each = query[:1, :1].numel()
    for batches in _pieces(query.shape[0], query.shape[1] * each):
        for heads in _pieces(query.shape[1], (batches.stop - batches.start) * each):
            yield _Heads(batches, heads)


def _empty_results(operator: OpOverload, first: Tensor, /, *args: object, **options: object) -> tuple[Tensor, ...]:
    """Return uninitialised tensors with the shapes, strides and dtypes that the operator promises."""
    promised = _promised(operator, first, *args, **options)
    return tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=first.device) for x in promised)


def _promised(operator: OpOverload, *args: object, **options: object) -> Any:
    return operator(*map(_on_meta, args), **{name: _on_meta(each) for name, each in options.items()})


def _on_meta(x: object) -> object:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _whole(operator: OpOverload) -> Callable[..., Tensor]:
    """Return a function that runs the operator on whole float32 copies, for vectors."""

    def run(first: Tensor, *args: object, **options: object) -> Tensor:
        rest = (a.float() if isinstance(a, Tensor) else a for a in args)
        result: Tensor = operator(first.float(), *rest, **options)
        return result.to(first.dtype)

    return run


IMPLEMENTATIONS: dict[object, Callable[..., object]] = {
    aten.mm.default: mm,
    aten.addmm.default: addmm,
    aten.bmm.default: bmm,
    aten.baddbmm.default: baddbmm,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    **{operator: _whole(operator) for operator in (aten.mv.default, aten.addmv.default, aten.dot.default)},
}

for _operator, _wide in WIDE.items():
    torch.library.impl(f"{NAMESPACE}::{_wide._schema.name.partition('::')[2]}", "CPU", IMPLEMENTATIONS[_operator])
