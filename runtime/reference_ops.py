"""Reference implementations of the symbolic ops: slow, obvious, on any device. The eager lowering runs them."""

from __future__ import annotations

import torch

from fxprec.codec import round_stats, round_with_row
from fxprec.formats import Format, parse
from fxprec.runtime.reference import reference_decode, reference_encode, reference_quantize
from fxprec.symbolic import stored_dtype


def quantize(x: torch.Tensor, table: torch.Tensor, site: int, format: str, storage: str) -> torch.Tensor:
    scaled = _scaled(x, table, site)
    if storage == "simulate":
        return round_with_row(scaled, *table[site].tolist()[1:])
    fmt = parse(format)
    return _as_stored(reference_encode(scaled, fmt), fmt, storage)


def _as_stored(codes: torch.Tensor, fmt: Format, storage: str) -> torch.Tensor:
    dtype = stored_dtype(fmt, storage)
    return codes.view(dtype) if dtype.is_floating_point else codes


def dequantize(
    q: torch.Tensor, table: torch.Tensor, site: int, format: str, storage: str, dtype: torch.dtype
) -> torch.Tensor:
    fmt = parse(format)
    x = q if storage == "simulate" else reference_decode(q.view(fmt.code_dtype), fmt)
    return (x * 2.0 ** -_scale_exp(table, site)).to(dtype)


def rescale(g: torch.Tensor, table: torch.Tensor, site: int) -> torch.Tensor:
    return _scaled(g, table, site).to(g.dtype)


def observe(grad: torch.Tensor, x: torch.Tensor, tensor: int, format: str, grad_format: str) -> torch.Tensor:
    return grad.clone()


def damage(grad: torch.Tensor, x: torch.Tensor, tensor: int, format: str, grad_format: str) -> torch.Tensor:
    """Return the predicted damage of rounding ``x`` and of rounding ``grad``, (2,) float32.

    ALGORITHMS 3, "The exact policy": |sum other * err| + sqrt(sum other^2 * err^2) with err = rounded - exact. For
    ``x`` the other factor is its gradient; for the gradient it is ``x``, by symmetry of the first-order term.
    """
    pair = (_first_order(x, grad, format), _first_order(grad, x, grad_format))
    return torch.stack(pair).to(torch.float32)


def _first_order(x: torch.Tensor, other: torch.Tensor, fmt: str) -> torch.Tensor:
    error = reference_quantize(x.float(), parse(fmt)).double() - x.double()
    product = other.double() * error
    return product.sum().abs() + product.square().sum().sqrt()


def site_stats(x: torch.Tensor, table: torch.Tensor, site: int, format: str) -> torch.Tensor:
    row = table[site].tolist()
    stats = round_stats(_scaled(x, table, site), tuple(row))
    count = max(x.numel(), 1)
    amax = x.abs().max().float() if x.numel() else torch.zeros((), device=x.device)
    return torch.stack([stats.overflow / count, stats.underflow / count, amax])


def _scale_exp(table: torch.Tensor, site: int) -> int:
    return int(table[site, 0])


def _scaled(x: torch.Tensor, table: torch.Tensor, site: int) -> torch.Tensor:
    return x.to(torch.float32) * 2.0 ** _scale_exp(table, site)


for _function in (quantize, dequantize, rescale, observe, damage, site_stats):
    torch.library.impl(f"fxprec::{_function.__name__}", "CompositeExplicitAutograd", _function)
