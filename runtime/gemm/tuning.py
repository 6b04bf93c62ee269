"""Find the fastest tile of the generated GEMM at a product's first run, and keep it on disk for other processes.

The key of an entry has the GPU's name, the version of Triton and everything that the time depends on: sizes, layouts,
dtypes and formats. Formats count because decoding changes which tile is fastest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
import triton

from fxprec.numerics import kept_text
from fxprec.runtime.gemm.tiles import TILES, Tile

log = logging.getLogger(__name__)
_tiles: dict[str, Tile] = {}


def key_of(device: torch.device, *facts: object) -> str:
    """Return the key of a product on a device; ``facts`` are plain data or are turned into text by ``str``."""
    return json.dumps([torch.cuda.get_device_name(device), triton.__version__, *facts], default=str)


def known_tile(key: str) -> Tile | None:
    """Return the fastest tile that this process or another one found, or None."""
    if key not in _tiles and (tile := _read(key)) is not None:
        _tiles[key] = tile
    return _tiles.get(key)


def fastest(key: str, tiles: Sequence[Tile], run: Callable[[Tile], None]) -> Tile:
    """Time ``tiles`` by ``run``, leave out those that cannot start, and keep the fastest. Raises if none can start."""
    begun = time.perf_counter()
    seconds = {tile: _seconds(run, tile) for tile in tiles}
    best = min(tiles, key=lambda tile: seconds[tile])
    if seconds[best] == math.inf:
        run(best)  # raises what keeps it from starting
    log.info("timed %d tiles in %.1f s, took %s for %s", len(tiles), time.perf_counter() - begun, best, key)
    _tiles[key] = best
    kept_text.keep(_name(key), json.dumps({"key": key, "tile": asdict(best)}))
    return best


def _seconds(run: Callable[[Tile], None], tile: Tile) -> float:
    try:
        return float(triton.testing.do_bench(lambda: run(tile), return_mode="median")) / 1e3
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "triton":
            raise
        log.info("%s does not run: %s", tile, error)
        return math.inf


def _read(key: str) -> Tile | None:
    text = kept_text.read(_name(key))
    found = None if text is None else json.loads(text)
    if found is None or found["key"] != key:
        return None
    return next((tile for tile in TILES if asdict(tile) == found["tile"]), None)


def _name(key: str) -> str:
    return f"tile-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
