"""Kernels of casts on CPUs, which lowering makes of `fxprec.ir.symbolic`'s operators.

``store`` gives codes, rounded values and counts, ``round`` the same without codes; ``store_`` and ``round_`` write the
rounded values over ``x``; ``load`` reads codes. The values come at the scale they were stored with; ``keep`` keeps inf
and NaN there. ``laid_out`` converts a convolution's weights, or their gradient, to float32 or bfloat16, and lays them
out as they are read next: ``channels_last``, or contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, Overwritten
from fxprec.ir.symbolic import Stored, stored_dtype
from fxprec.numerics.formats import parse
from fxprec.numerics.stats import WIDTH

_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)


@dataclass(frozen=True)
class Store(Stored, op="store", returns="(Tensor, Tensor, Tensor)", tags=_TAGS):
    value: bool
    keep: bool


@Store.fake
def _(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, value: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.empty_like(x, dtype=stored_dtype(parse(format), storage))
    values = torch.empty_like(x, dtype=torch.float32) if value else x.new_empty(0, dtype=torch.float32)
    return codes, values, x.new_empty(WIDTH, dtype=torch.float64)


@dataclass(frozen=True)
class Round(Stored, op="round", returns="(Tensor, Tensor)", tags=_TAGS):
    keep: bool


@Round.fake
def _(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.float32), x.new_empty(WIDTH, dtype=torch.float64)


@dataclass(frozen=True)
class _StoredOver(Stored):
    x: Overwritten
    keep: bool


@dataclass(frozen=True)
class StoreOver(_StoredOver, op="store_", returns="(Tensor, Tensor)", tags=_TAGS):
    pass


@StoreOver.fake
def _(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty_like(x, dtype=stored_dtype(parse(format), storage))
    return codes, x.new_empty(WIDTH, dtype=torch.float64)


@dataclass(frozen=True)
class RoundOver(_StoredOver, op="round_", tags=_TAGS):
    pass


@RoundOver.fake
def _(x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool) -> torch.Tensor:
    return x.new_empty(WIDTH, dtype=torch.float64)


@dataclass(frozen=True)
class Load(Call, op="load", tags=_TAGS):
    q: Node
    table: Node
    row: int
    format: str


@Load.fake
def _(q: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    return torch.empty_like(q, dtype=torch.float32)


LAID_OUT_DTYPES = frozenset({torch.float32, torch.bfloat16})
"""What a compiled kernel converts between."""


@dataclass(frozen=True)
class LaidOut(Call, op="laid_out", tags=_TAGS):
    x: Node
    dtype: torch.dtype
    channels_last: bool


@LaidOut.fake
def _(x: torch.Tensor, dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=layout)


STORE = Store.target
ROUND = Round.target
STORE_ = StoreOver.target
ROUND_ = RoundOver.target
LOAD = Load.target
