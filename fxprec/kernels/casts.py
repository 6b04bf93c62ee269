"""Kernels of casts on CPUs, to which lowering converts operators of `fxprec.ir.symbolic`.

Values keep the scale with which they are stored; with ``keep`` they keep inf and NaN.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, FakeCall, Overwritten, Size
from fxprec.ir.symbolic import Stored, codes_like, counts_like

KERNEL_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)


def _stored(call: FakeCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.empty_like(call.x, dtype=torch.float32) if call.value else call.x.new_empty(0, dtype=torch.float32)
    return codes_like(call.x, call.format, call.storage), values, counts_like(call.x)


class Store(Stored, op="store", fake=_stored, returns="(Tensor, Tensor, Tensor)", tags=KERNEL_TAGS):
    """Return codes, rounded values (empty without ``value``) and counts."""

    value: bool
    keep: bool


def _rounded(call: FakeCall) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(call.x, dtype=torch.float32), counts_like(call.x)


class Round(Stored, op="round", fake=_rounded, returns="(Tensor, Tensor)", tags=KERNEL_TAGS):
    """Return rounded values and counts."""

    keep: bool


class _StoredOver(Stored):
    x: Overwritten
    keep: bool


def _stored_over(call: FakeCall) -> tuple[torch.Tensor, torch.Tensor]:
    return codes_like(call.x, call.format, call.storage), counts_like(call.x)


class StoreOver(_StoredOver, op="store_", fake=_stored_over, returns="(Tensor, Tensor)", tags=KERNEL_TAGS):
    """Return codes and counts, and overwrite ``x`` with the rounded values."""


class RoundOver(_StoredOver, op="round_", fake=lambda call: counts_like(call.x), tags=KERNEL_TAGS):
    """Return counts, and overwrite ``x`` with the rounded values."""


class Load(Call, op="load", fake=lambda call: torch.empty_like(call.q, dtype=torch.float32), tags=KERNEL_TAGS):
    """Decode codes to float32, with the scale still on."""

    q: Node
    table: Node
    row: int
    format: str


class StoreBlocks(Call, op="store_blocks", fake=lambda call: codes_like(call.x, call.format, "packed")):
    """Encode a tensor in blocks."""

    x: Node
    seed: Node | None
    whole: Node | None
    row: int
    format: str


class LoadBlocks(Call, op="load_blocks", fake=lambda call: call.q.new_empty(call.elements, dtype=call.dtype)):
    """Decode the first ``elements`` from blocks."""

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
