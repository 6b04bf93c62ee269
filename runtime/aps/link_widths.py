"""Compute the bytes and the rounding errors of the widths from which a link plan chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fxprec.numerics.formats import Format
from fxprec.runtime.aps.link_problem import ALL_REDUCE_SENDS, Width
from fxprec.runtime.aps.wire import INSIDE, Coding

FOUR_BITS = "1-2-1/256:e8m0"
_LOST = {False: 0.0447, True: 0.0895}
"""Share of normal values' squared norm that rounding to no mantissa bits would lose; the key says if stochastically."""
_LOST_IN_FOUR_BITS = {False: 0.0128, True: 0.036}
"""Share of rotated values' squared norm that rounding to `FOUR_BITS` loses; keys as in `_LOST`."""


def widths_of(
    codings: Mapping[int, Coding], *, stochastic: bool, passes: int = 2, ring_steps: int = 1
) -> dict[Width, Coding]:
    """Return each width with its bytes and rounding errors, and its coding; seconds are measured later.

    `passes` as in `Transport`; `ring_steps` is what an all-reduce takes. If layers have a scale, exponents take one
    exchange more.

    A number with m mantissa bits loses 4^-m of what a number with none loses. Below the smallest normal number a
    rounding loses a 12th of the subnormals' unit squared.
    """
    found: dict[Width, Coding] = {}
    for bits, wire in codings.items():
        if wire is None or isinstance(wire, torch.dtype):
            lost = 0.0 if wire is None else _LOST[False] * torch.finfo(wire).eps ** 2
            in_ring = passes == 2
            messages, sends = (ring_steps, ALL_REDUCE_SENDS) if in_ring else (1, 1)
            width = Width(bits, bits // 8, messages=messages, sends=sends, error=lost, in_ring=in_ring)
        elif isinstance(fmt := wire.kind, Format):
            unit = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits - (wire.top - 1))
            width = Width(
                bits,
                wire.code_bytes,
                messages=passes + 1,
                sends=passes + 1,
                error=_LOST[stochastic] * 4.0**-fmt.mantissa_bits,
                floor=unit * ((1 + stochastic) / 12) ** 0.5,
            )
        else:
            # DDP's hook also exchanges exponents, which mark layers of zeros and layers that are not finite
            messages = 3 if passes == 2 else 1
            lost = _LOST_IN_FOUR_BITS[stochastic]
            width = Width(bits, wire.code_bytes, wire.block, messages=messages, sends=messages, error=lost)
        found[width] = wire
    return found


def by_nodes(width: Width, cast: Width, node: int, nodes: int, ring_steps: int = 1, passes: int = 2) -> Width:
    """Return a width by nodes of `node` ranks, which exchange chunks between nodes; `cast` is the width of bf16.

    `ring_steps` is what an all-reduce between nodes takes, `passes` as in `Transport`.

    In an all-reduce, exponents are exchanged over all ranks while layers are sent inside of the nodes. Two nodes send
    each other their codes once, and each adds them. In a reduce-scatter what lies between nodes is as without nodes.
    """
    coded, both_ways = width.bits < 16, passes == 2
    direct = coded and both_ways and nodes == 2
    messages = 1 if direct else 2 if coded else ring_steps
    return replace(
        width,
        encode=cast.encode + width.encode / node,
        decode=cast.decode + width.decode / node,
        messages=messages if both_ways else width.messages,
        sends=(ALL_REDUCE_SENDS if not coded else messages) if both_ways else width.sends,
        rounds_sums=not direct,
        sends_to_all=1 if coded and both_ways else 0,
        inside_bytes=INSIDE.itemsize if coded else width.code_bytes,
        inside_error=cast.error if coded else width.error,
    )


def in_low_rank(cast: Width, rank: int, encode: float, decode: float) -> Width:
    """Return a width in low rank, which sums two matrices one after the other at their owners, in `cast`'s dtype."""
    at_owners = replace(cast, messages=4, sends=4, in_ring=False)
    return replace(at_owners, low_rank=rank, encode=encode, decode=decode)
