"""Turn an FSDP2 module's shard, whose parameters may have several dtypes, into one message, and messages into shards.

A message has the codes of all matrices, each filled up to whole blocks, then the bytes of the other parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxprec.runtime.aps.shards import filled
from fxprec.runtime.aps.wire import Wire


class Piece(NamedTuple):
    """One parameter's shard as it is gathered."""

    size: int
    """Size in bytes."""
    dtype: torch.dtype
    coded: bool


def numbers(shard: Tensor, pieces: Sequence[Piece], block: int) -> Tensor:
    """Return the elements (n,) of a shard's (bytes,) coded pieces in float32, each filled up to whole blocks."""
    split = zip(shard.split([piece.size for piece in pieces]), pieces, strict=True)
    return torch.cat([filled(_typed(raw, piece.dtype)[None], block) for raw, piece in split if piece.coded])


def rest(shard: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the bytes of a shard's (bytes,) other pieces."""
    split = zip(shard.split([piece.size for piece in pieces]), pieces, strict=True)
    return [raw for raw, piece in split if not piece.coded]


def read(messages: Tensor, wire: Wire, pieces: Sequence[Piece], out: Tensor, *, adds: bool = False) -> None:
    """Decode messages (ranks, bytes) and write their shards into `out` (ranks, bytes).

    With `adds` coded pieces are differences, which are added in float32 to what `out` has.
    """
    spans = [-(-piece.size // piece.dtype.itemsize // wire.block) * wire.block for piece in pieces if piece.coded]
    uncoded = [piece.size for piece in pieces if not piece.coded]
    codes, *raws = messages.split([messages.shape[1] - sum(uncoded), *uncoded], 1)
    decoded = wire.decode(codes.reshape(-1))
    values, others = iter(decoded.view(len(out), -1).split(spans, 1)), iter(raws)
    for view, piece in zip(out.split([piece.size for piece in pieces], 1), pieces, strict=True):
        if piece.coded:
            got = next(values)[:, : piece.size // piece.dtype.itemsize]
            got = got + _typed(view, piece.dtype) if adds else got
            view.copy_(got.to(piece.dtype).view(torch.uint8))
        else:
            view.copy_(next(others))


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers of a dtype, copied if they are not aligned for it."""
    aligned = all(n % dtype.itemsize == 0 for n in (raw.storage_offset(), *raw.stride()[:-1]))
    return (raw if aligned else raw.clone(memory_format=torch.contiguous_format)).view(dtype)
