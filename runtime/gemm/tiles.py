"""List the tiles of the generated GEMM, from which autotuning chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One program's part of a product: ``rows`` x ``columns`` elements, summed in steps of ``depth``."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    least_arch: int = 80
    """The oldest architecture on which the tile spills no registers."""


# Large tiles for the tensor cores, small ones for few rows and for odd shapes. None spills registers where it is used,
# and each fits the 99 KiB of sm_89's shared memory (benchmarks/results/*-gemm-kernels.json).
TILES = (
    Tile(128, 128, 64, 8, 3, least_arch=89),
    Tile(128, 128, 32, 8, 4, least_arch=89),
    Tile(128, 64, 64, 4, 3),
    Tile(64, 128, 64, 4, 3),
    Tile(64, 64, 64, 4, 4),
    Tile(32, 64, 32, 4, 4),
    Tile(16, 128, 64, 4, 4),
)
SMALL = Tile(16, 32, 32, 4, 1)
"""The interpreter's tile. Programs run one by one there, and a small tile lets tests reach edges."""
