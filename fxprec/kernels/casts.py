"""Kernels of casts on CPUs, which lowering makes of `fxprec.ir.symbolic`'s operators.

``store`` gives codes, rounded values and counts, ``round`` the same without codes; ``store_`` and ``round_`` write the
rounded values over ``x``; ``load`` reads codes. The values come at the scale they were stored with; ``keep`` keeps inf
and NaN there. ``store_blocks`` and ``load_blocks`` are ``quantize`` and ``dequantize`` of a block format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, Overwritten, Size
from fxprec.ir.symbolic import Stored, records_like, stored_dtype
from fxprec.numerics.formats import parse
from fxprec.numerics.stats import WIDTH

KERNEL_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)


def _codes_like(x: torch.Tensor, format: str, storage: str) -> torch.Tensor:
    return torch.empty_like(x, dtype=stored_dtype(parse(format), storage))


def _counts(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty(WIDTH, dtype=torch.float64)


def _stored(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, value: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.empty_like(x, dtype=torch.float32) if value else x.new_empty(0, dtype=torch.float32)
    return _codes_like(x, format, storage), values, _counts(x)


@dataclass(frozen=True)
class Store(Stored, op="store", fake=_stored, returns="(Tensor, Tensor, Tensor)", tags=KERNEL_TAGS):
    value: bool
    keep: bool


def _rounded(x: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.float32), _counts(x)


@dataclass(frozen=True)
class Round(Stored, op="round", fake=_rounded, returns="(Tensor, Tensor)", tags=KERNEL_TAGS):
    keep: bool


@dataclass(frozen=True)
class _StoredOver(Stored):
    x: Overwritten
    keep: bool


def _stored_over(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _codes_like(x, format, storage), _counts(x)


@dataclass(frozen=True)
class StoreOver(_StoredOver, op="store_", fake=_stored_over, returns="(Tensor, Tensor)", tags=KERNEL_TAGS):
    pass


@dataclass(frozen=True)
class RoundOver(_StoredOver, op="round_", fake=_counts, tags=KERNEL_TAGS):
    pass


def _loaded(q: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(q, dtype=torch.float32)


@dataclass(frozen=True)
class Load(Call, op="load", fake=_loaded, tags=KERNEL_TAGS):
    q: Node
    table: Node
    row: int
    format: str


def _blocks(
    x: torch.Tensor, seed: torch.Tensor | None, whole: torch.Tensor | None, row: int, format: str
) -> torch.Tensor:
    return records_like(x, format)


@dataclass(frozen=True)
class StoreBlocks(Call, op="store_blocks", fake=_blocks):
    x: Node
    seed: Node | None
    whole: Node | None
    row: int
    format: str


def _loaded_blocks(
    q: torch.Tensor, whole: torch.Tensor | None, row: int, format: str, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    return q.new_empty(elements, dtype=dtype)


@dataclass(frozen=True)
class LoadBlocks(Call, op="load_blocks", fake=_loaded_blocks):
    q: Node
    whole: Node | None
    row: int
    format: str
    elements: Size
    dtype: torch.dtype


STORE = Store.target
ROUND = Round.target
STORE_ = StoreOver.target
ROUND_ = RoundOver.target
LOAD = Load.target
