"""Compute the bytes and the rounding errors of the widths from which a link plan chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fxprec.numerics.formats import Format
from fxprec.runtime.aps.link_problem import ALL_REDUCE_SENDS, IN_RING, Width
from fxprec.runtime.aps.wire import INSIDE, Coding

FOUR_BITS = "1-2-1/256:e8m0"
_LOST = {False: 0.0447, True: 0.0895}
"""Share of normal values' squared norm that rounding to no mantissa bits would lose; the key says if stochastically."""
_LOST_IN_FOUR_BITS = {False: 0.0128, True: 0.036}
"""Share of rotated values' squared norm that rounding to `FOUR_BITS` loses; keys as in `_LOST`."""


def widths_of(codings: Mapping[int, Coding], *, stochastic: bool, passes: int = 2) -> dict[Width, Coding]:
    """Return each width with its bytes and rounding errors, and its coding; seconds are measured later.

    `passes` as in `Transport`. If layers have a scale, exponents take one exchange more, in a ring.

    A number with m mantissa bits loses 4^-m of what a number with none loses. Below the smallest normal number a
    rounding loses a 12th of the subnormals' unit squared.
    """
    found: dict[Width, Coding] = {}
    codes = 1 + IN_RING * (passes - 1)
    for bits, wire in codings.items():
        if wire is None or isinstance(wire, torch.dtype):
            lost = 0.0 if wire is None else _LOST[False] * torch.finfo(wire).eps ** 2
            in_ring = passes == 2
            width = Width(
                bits, bits // 8, messages=1, sends=ALL_REDUCE_SENDS if in_ring else 1, error=lost, in_ring=in_ring
            )
        elif isinstance(fmt := wire.kind, Format):
            unit = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits - (wire.top - 1))
            width = Width(
                bits,
                wire.code_bytes,
                messages=passes + 1,
                sends=ALL_REDUCE_SENDS + codes,
                error=_LOST[stochastic] * 4.0**-fmt.mantissa_bits,
                floor=unit * ((1 + stochastic) / 12) ** 0.5,
            )
        else:
            # DDP's hook also exchanges exponents, which mark layers of zeros and layers that are not finite
            messages, sends = (3, ALL_REDUCE_SENDS + codes) if passes == 2 else (1, codes)
            lost = _LOST_IN_FOUR_BITS[stochastic]
            width = Width(bits, wire.code_bytes, wire.block, messages=messages, sends=sends, error=lost)
        found[width] = wire
    return found


def by_nodes(width: Width, cast: Width, node: int, nodes: int) -> Width:
    """Return a width by nodes of `node` ranks, which exchange chunks between nodes; `cast` is the width of bf16.

    Exponents are exchanged over all ranks while layers are sent inside of the nodes. Two nodes send each other their
    codes once, and each adds them.
    """
    coded, direct = not width.in_ring, not width.in_ring and nodes == 2
    inside, lost = (INSIDE.itemsize, cast.error) if coded else (width.code_bytes, width.error)
    return replace(
        width,
        encode=cast.encode + width.encode / node,
        decode=cast.decode + width.decode / node,
        messages=2 if coded and not direct else 1,
        sends=1 if direct else 1 + IN_RING if coded else ALL_REDUCE_SENDS,
        rounds_sums=not direct,
        sends_to_all=ALL_REDUCE_SENDS if coded else 0,
        inside_bytes=inside,
        inside_error=lost,
    )


def in_low_rank(cast: Width, rank: int, encode: float, decode: float) -> Width:
    """Return a width in low rank, which sends two matrices one after the other, each as `cast` sends a layer."""
    twice = replace(cast, messages=2 * cast.messages, sends=2 * cast.sends)
    return replace(twice, low_rank=rank, encode=encode, decode=decode)
