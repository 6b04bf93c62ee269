"""The exchange on one rank that sees all gradients: slow, obvious, numpy and math.

Definitions: docs/algorithms.md, "Communication in 8 bits".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from block_reference import reference_encode_blocks
from torch import Tensor

from fxprec.numerics.blocks import BlockFormat, find
from fxprec.numerics.formats import parse
from fxprec.numerics.reference import reference_quantize
from fxprec.runtime.aps.codec_tables import TABLES
from fxprec.runtime.aps.codecs import codec
from fxprec.runtime.aps.rotation import signs_of
from fxprec.runtime.aps.state import _mix
from fxprec.runtime.aps.wire import wire_of


def nearest_in_table(x: np.ndarray, name: str) -> np.ndarray:
    """Values by looking at every entry, in float64; ties to the smaller magnitude (the first of the sorted table)."""
    table = np.array(codec(name).magnitudes, dtype=np.float64)
    index = np.abs(np.abs(x.astype(np.float64))[:, None] - table[None, :]).argmin(1)
    return np.copysign(table[index], x).astype(np.float32)


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    if kind in TABLES:
        return nearest_in_table(x, kind)
    values = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    return reference_quantize(values, parse(kind)).float().numpy()


def ceil_log2(x: float) -> int:
    mantissa, exponent = math.frexp(x)
    return exponent - 1 if mantissa == 0.5 else exponent


def ldexp(x: np.ndarray, t: int) -> np.ndarray:
    """Exact in float64, then one rounding to float32."""
    return np.ldexp(x.astype(np.float64), t).astype(np.float32)


def shared_exponent(layer: list[np.ndarray], num_terms: int) -> int | None:
    largest = max(float(np.abs(g.astype(np.float64)).max()) for g in layer)
    return None if largest == 0 else min(138, max(-115, ceil_log2(largest * num_terms)))


def chunk_owners(total: int, num_owners: int) -> np.ndarray:
    """Who owns each element of a bucket: equal chunks, the last one short."""
    return np.arange(total) // -(-total // num_owners)


def mean_of_bucket(ranks: list[list[np.ndarray]], options: dict[str, Any]) -> list[np.ndarray]:
    """The mean gradient of each layer, of the layers by rank."""
    num_owners = -(-len(ranks) // (options.get("group_size") or 1))
    layers = list(zip(*ranks, strict=True))
    sizes = [layer[0].size for layer in layers]
    owners = np.split(chunk_owners(sum(sizes), num_owners), np.cumsum(sizes)[:-1])
    return [mean_of_layer(list(layer), part, options) for layer, part in zip(layers, owners, strict=True)]


def mean_of_layer(grads: list[np.ndarray], owners: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """The mean gradient (elements,) of one layer's gradients by rank; `owners` (elements,) says who sums."""
    n, kind, mode = len(grads), options.get("format", "e5m2"), options.get("accumulate", "fp32")
    if grads[0].size == 0:
        return grads[0]
    if any(not np.isfinite(g).all() for g in grads):
        return np.full(grads[0].shape, np.nan, dtype=np.float32)
    if kind not in TABLES and isinstance(fmt := find(kind), BlockFormat):
        return mean_in_blocks(grads, fmt, rounds_sum=options.get("rounds_sum", True))
    shared = options["exponent"] if "exponent" in options else shared_exponent(grads, 1 if mode == "fp32" else n)
    if shared is None:
        return np.zeros(grads[0].shape, dtype=np.float32)
    scaling = options.get("scaling", "aps")
    scaled, divided = scaling == "aps", scaling == "none"
    top = wire_of(kind).top
    t = top - shared if scaled else 0
    sent = [rounded(ldexp(g, t) if scaled else g / np.float32(n if divided else 1), kind) for g in grads]
    size = options.get("group_size") or 1
    sent = [_in_order(sent[k : k + size], kind, mode) for k in range(0, n, size)]
    total = np.empty(grads[0].shape, dtype=np.float32)
    for owner in np.unique(owners):
        mask = owners == owner
        parts = [s[mask] for s in sent]
        if not options.get("rounds_sum", True):
            total[mask] = sum(parts[1:], parts[0])
        elif mode == "fp32":
            total[mask] = _sum_fp32(parts, kind, top if scaled else None)
        else:
            first = int(owner) + 1
            total[mask] = _in_order([parts[(first + k) % len(parts)] for k in range(len(parts))], kind, mode)
    return ldexp(total, -t) / np.float32(1 if divided else n)


def _sum_fp32(parts: list[np.ndarray], kind: str, top: int | None) -> np.ndarray:
    total = parts[0].copy()
    for p in parts[1:]:
        total = (total + p).astype(np.float32)
    largest = float(np.abs(total).max())
    if largest == 0 or top is None:
        return rounded(total, kind)
    t = top - ceil_log2(largest)
    return ldexp(rounded(ldexp(total, t), kind), -t)


def _in_order(terms: list[np.ndarray], kind: str, mode: str) -> np.ndarray:
    """The sum in this order, every operation rounded; Kahan's with its compensation."""
    total, lost = terms[0].copy(), np.zeros_like(terms[0])
    for term in terms[1:]:
        if mode == "format":
            with np.errstate(invalid="ignore"):  # inf - inf
                total = rounded(total + term, kind)
            continue
        y = rounded(term - lost, kind)
        t = rounded(total + y, kind)
        lost = rounded(rounded(t - total, kind) - y, kind)
        total = t
    return total


def mean_in_blocks(grads: list[np.ndarray], fmt: BlockFormat, step: int = 0, *, rounds_sum: bool = True) -> np.ndarray:
    """The mean of one layer: rotated block by block, coded, added in rank order, coded, divided, rotated back."""
    signs = signs_of(_mix((0, step, 0, 0)), fmt.block, torch.device("cpu")).numpy()
    up, down = 2.0 ** -math.ceil(math.log2(fmt.block) / 2), 2.0 ** -math.floor(math.log2(fmt.block) / 2)
    total = None
    with np.errstate(all="ignore"):
        for g in grads:
            padded = np.zeros(-(-g.size // fmt.block) * fmt.block, np.float32)
            padded[: g.size] = g
            sent = in_blocks(times_hadamard(padded.reshape(-1, fmt.block) * (signs * np.float32(up))), fmt)
            total = sent if total is None else total + sent
        mean = (in_blocks(total, fmt) if rounds_sum else total) / np.float32(len(grads))
        return (times_hadamard(mean * np.float32(down)) * signs).reshape(-1)[: grads[0].size]


def in_blocks(x: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    coded = reference_encode_blocks([float(v) for v in x.ravel()], fmt)
    return np.array(coded.values(fmt, x.size), np.float32).reshape(x.shape)


def times_hadamard(rows: np.ndarray) -> np.ndarray:
    """Sylvester's matrix times each row, by its definition: of two halves a, b the transforms of a + b and a - b."""
    if rows.shape[1] == 1:
        return rows
    a, b = np.split(rows, 2, axis=1)
    return np.concatenate([times_hadamard(a + b), times_hadamard(a - b)], axis=1)


def rows_of(rank: int, world: int, layers: Sequence[int], case: str) -> Tensor:
    """A reduce-scatter's input (world, elements) of one rank; the first layer has 5 elements."""
    g = torch.Generator().manual_seed(rank)
    scales = torch.cat([torch.full((n,), 10.0 ** (4 * k - 8)) for k, n in enumerate(layers)])
    rows = torch.randn(world, sum(layers), generator=g) * scales
    rows[:, :5] *= case != "zero-layer"
    if case == "nan" and rank == 1:
        rows[2, 7] = torch.nan
    return rows


def sum_of_codes(parts: list[np.ndarray], fmt: str) -> np.ndarray:
    """A reduce-scatter of one layer: ranks' codes with a shared scale, added in float32 in rank order."""
    if not parts[0].size or not all(np.isfinite(p).all() for p in parts):
        return np.full(parts[0].shape, np.nan, dtype=np.float32)
    shared = shared_exponent(parts, 1)
    if shared is None:
        return np.zeros(parts[0].shape, dtype=np.float32)
    t = wire_of(fmt).top - shared
    total = np.zeros(parts[0].shape, dtype=np.float32)
    for p in parts:
        total = total + rounded(ldexp(p, t), fmt)
    return ldexp(total, -t)
