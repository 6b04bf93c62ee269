"""Find the parameters of one FSDP2 module in a rank's shard, and fill shards up to whole blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fxprec.compat import sharded_parameters


@dataclass(frozen=True)
class Shards:
    """The parameters that FSDP2 gathers and reduces with module number `index` of a model, in FSDP2's order."""

    name: str = ""
    index: int = 0
    parameters: tuple[Tensor, ...] = ()
    sizes: tuple[int, ...] = ()
    """Elements of each parameter in one rank's padded shard."""

    @classmethod
    def of(cls, name: str, owner: FSDPModule, index: int) -> Shards:
        """Return the shards of an `FSDPModule` with this name."""
        found = sharded_parameters(owner)
        return cls(name, index, tuple(found), tuple(_shard_size(p) for p in found if isinstance(p, DTensor)))

    @property
    def elements(self) -> tuple[int, int]:
        """Return the elements of a rank's shard: of matrices, and of parameters of less than two dimensions."""
        matrices = sum(n for p, n in zip(self.parameters, self.sizes, strict=True) if p.dim() > 1)
        return matrices, sum(self.sizes) - matrices

    def views(self, rows: Tensor) -> list[Tensor]:
        """Return each parameter's columns of gradients (ranks, n).

        If n is less than the sum of sizes, because parameters have no gradient, columns are divided in proportion.
        """
        total, length = sum(self.sizes), rows.shape[1]
        ends = [size * length // max(total, 1) for size in accumulate(self.sizes)]
        return [rows[:, start:end] for start, end in pairwise([0, *ends])]


def _shard_size(p: DTensor) -> int:
    sharded = (k for k, placement in enumerate(p.placements) if placement.is_shard())
    world = math.prod(p.device_mesh.size(k) for k in sharded)
    rows = -(-p.shape[0] // world) if p.dim() else 1
    return rows * (p.numel() // p.shape[0] if p.dim() and p.shape[0] else 1)


def filled(piece: Tensor, block: int) -> Tensor:
    """Return rows (ranks, n) as flat float32, each row padded with zeros to whole blocks."""
    return F.pad(piece.to(torch.float32), (0, -piece.shape[1] % block)).reshape(-1)
