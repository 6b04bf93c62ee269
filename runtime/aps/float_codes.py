"""Codes of any format of at most 16 bits at memory speed: `fxprec.codec`, in blocks or fused by Inductor.

Small tensors run eagerly in blocks that stay in the second-level cache; large ones through one fused kernel for each
format, compiled at first use and kept in Inductor's own cache. Both give the codes of `fxprec.codec`, which decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from fxprec import codec
from fxprec.errors import FxprecWarning
from fxprec.formats import Format

COMPILE_FROM = 1 << 21  # elements; below it a step saves milliseconds, and the first one costs 15 s of compilation
_BLOCK = 1 << 15  # elements: 128 KiB of float32


@cache
def _compiled(function: Callable[..., Tensor], fmt: Format) -> Callable[[Tensor], Tensor]:
    """The function for one format, fused; the eager one, with a warning, where Inductor finds no compiler."""
    eager = partial(function, fmt=fmt)
    fused = torch.compile(lambda x: function(x, fmt), dynamic=True, fullgraph=True)
    try:
        fused(function(torch.ones(COMPILE_FROM), fmt) if function is codec.decode_bits else torch.ones(COMPILE_FROM))
    except (torch._dynamo.exc.BackendCompilerFailed, RuntimeError) as error:
        cause = str(error).splitlines()[0]
        warnings.warn(
            f"codes of {fmt.name} could not be compiled ({cause}); they run eagerly, several times slower: "
            "install a C++ compiler",
            FxprecWarning,
            stacklevel=2,
        )
        return eager
    return fused


def _run(function: Callable[..., Tensor], x: Tensor, fmt: Format) -> Tensor:
    if x.numel() >= COMPILE_FROM:
        return _compiled(function, fmt)(x)
    if x.numel() <= _BLOCK or x.is_cuda:
        return function(x, fmt)
    return torch.cat([function(block, fmt) for block in x.split(_BLOCK)])


def encode(values: Tensor, fmt: Format, uniform: Tensor | None = None) -> Tensor:
    """Codes (n,) in `fmt.code_dtype` of float32 values (n,), nearest even, or stochastic with `uniform` in [0, 1).

    Overflow follows the format's rule; NaN in a format without one becomes the largest number.
    """
    x = values.detach().to(torch.float32).contiguous()
    return _run(codec.encode_bits, x if uniform is None else round_stochastically(x, fmt, uniform), fmt)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Float32 values (n,) of codes; byte codes of small tensors through a table of 256 entries."""
    if fmt.bits <= 8 and codes.numel() < COMPILE_FROM:
        return _table(fmt, codes.device).index_select(0, codes.to(torch.int32))
    return _run(codec.decode_bits, codes, fmt)


def round_stochastically(x: Tensor, fmt: Format, uniform: Tensor) -> Tensor:
    """Values of the format: up with the share of the unit passed; beyond the largest, left to the nearest rule.

    Exact in float64 (a float32 in units of the format has at most 24 significant bits), so numbers of the format
    never move.
    """
    _, exponent = torch.frexp(x)
    unit = (exponent - 1).clamp(min=fmt.min_exponent) - fmt.mantissa_bits
    scaled = torch.ldexp(x.double().abs(), -unit)
    whole = torch.floor(scaled)
    up = (uniform.double() < scaled - whole).double()
    rounded = torch.copysign(torch.ldexp(whole + up, unit).to(torch.float32), x)
    return torch.where(x.abs() < fmt.largest, rounded, x)


@cache
def _table(fmt: Format, device: torch.device) -> Tensor:
    return codec.decode_bits(torch.arange(256, dtype=torch.uint8, device=device), fmt)
