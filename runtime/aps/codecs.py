"""Encode and decode 8-bit types that are given by a table: encode to the true nearest entry, decode by look-up.

Source: Dettmers 2016, sections 3.1 and 3.2. A code is one byte: the sign in bit 7, the index into 128 sorted magnitudes
below it. Ties go to the smaller magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from fxprec.errors import FormatError, did_you_mean
from fxprec.runtime.aps.codec_tables import NORMALISED_BY_MAXIMUM, NUM_MAGNITUDES, TABLES

Normalisation = Literal["maximum", "decade"]
SIGN_BIT = 0x80


@dataclass(frozen=True)
class Codec:
    """One 8-bit data type.

    `magnitudes` has 128 sorted non-negative float32 values; `normalisation` says how a tensor is brought into their
    range: divided by its largest magnitude, or by a power of ten.
    """

    name: str
    magnitudes: tuple[float, ...]
    normalisation: Normalisation = "maximum"

    def __post_init__(self) -> None:
        m = self.magnitudes
        if len(m) != NUM_MAGNITUDES or any(not math.isfinite(v) or v < 0 for v in m) or list(m) != sorted(m):
            raise FormatError(
                f"codec {self.name!r}: needs {NUM_MAGNITUDES} sorted, finite, non-negative magnitudes, got {len(m)}"
            )

    @property
    def largest(self) -> float:
        """Return the largest magnitude."""
        return self.magnitudes[-1]


@cache
def codec(name: str) -> Codec:
    """Return the codec of that name; raises `FormatError` for an unknown name."""
    if name not in TABLES:
        raise FormatError(f"unknown 8-bit codec {name!r}{did_you_mean(name, TABLES)}; known: {', '.join(TABLES)}")
    values = torch.tensor(list(TABLES[name]()), dtype=torch.float64, device="cpu").to(torch.float32).sort().values
    normalisation: Normalisation = "maximum" if name in NORMALISED_BY_MAXIMUM else "decade"
    return Codec(name, tuple(values.tolist()), normalisation)


@cache
def decode_table(c: Codec, device: torch.device) -> Tensor:
    """Return all 256 values by code, float32."""
    positive = torch.tensor(c.magnitudes, dtype=torch.float32, device="cpu")
    return torch.cat([positive, -positive]).to(device)


@cache
def thresholds(c: Codec, device: torch.device) -> Tensor:
    """Return the 127 float32 borders between neighbours: x <= border rounds to the lower neighbour, as ties do.

    The exact midpoint rarely is a float32. Rounding it down keeps every comparison with a float32 exact.
    """
    values = torch.tensor(c.magnitudes, dtype=torch.float32, device="cpu").double()
    middle = (values[:-1] + values[1:]) / 2  # exact: at most 25 significant bits apart by a few binades
    nearest = middle.to(torch.float32)
    lower = torch.nextafter(nearest, torch.full_like(nearest, -math.inf))
    return torch.where(nearest.double() > middle, lower, nearest).to(device)


def encode_values(x: Tensor, c: Codec, uniform: Tensor | None = None) -> Tensor:
    """Return codes (uint8, shape of `x`) of values in the table's range; larger ones and NaN become the largest.

    With `uniform` (float32 in [0, 1), shape of `x`), rounding is stochastic: the probability of rounding up is the
    value's relative position between its neighbours.
    """
    magnitude = x.detach().to(torch.float32).abs()
    if uniform is None:
        index = torch.bucketize(magnitude, thresholds(c, x.device), out_int32=True)
    else:
        index = _stochastic_index(magnitude, c, uniform)
    return torch.where(torch.signbit(x), index + SIGN_BIT, index).to(torch.uint8)


def _stochastic_index(magnitude: Tensor, c: Codec, uniform: Tensor) -> Tensor:
    values = decode_table(c, magnitude.device)[:NUM_MAGNITUDES]
    below = torch.bucketize(magnitude, values, right=True, out_int32=True).sub_(1).clamp_(0, NUM_MAGNITUDES - 2)
    low, high = values[below], values[below + 1]
    gap = (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    return below + (uniform < (magnitude - low) / gap).to(torch.int32)


def decode_values(codes: Tensor, c: Codec) -> Tensor:
    """Return the values (float32, shape of `codes`) of codes, without any scale."""
    return decode_table(c, codes.device)[codes.to(torch.int32)]


def scale_of(x: Tensor, c: Codec) -> Tensor:
    """Return the float32 divisor before encoding: the largest magnitude, or a power of ten above it.

    A tensor of zeros, or an empty one, has scale 1; one with an inf or a NaN has scale NaN, and decodes to NaN.
    """
    amax = x.detach().to(torch.float32).abs().amax() if x.numel() else x.new_zeros((), dtype=torch.float32)
    scale = amax
    if c.normalisation == "decade":
        scale = torch.pow(10.0, torch.ceil(torch.log10(amax.double() / c.largest))).to(torch.float32)
        scale = scale.clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)
    return torch.where(amax.isfinite(), torch.where(amax > 0, scale, 1.0), torch.nan)


def encode(x: Tensor, c: Codec) -> tuple[Tensor, Tensor]:
    """Return (codes, scale): the codes of x / scale, with the scale of `scale_of`."""
    scale = scale_of(x, c)
    return encode_values(x.detach().to(torch.float32) / scale, c), scale


def decode(codes: Tensor, scale: Tensor, c: Codec) -> Tensor:
    """Return the values (float32, shape of `codes`) of codes times their scale."""
    return decode_values(codes, c) * scale
