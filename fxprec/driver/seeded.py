"""Random numbers of an interpreted graph: drawn from the seeds it carries, as Inductor's code draws them.

Inductor turns ``rand`` into a seed, drawn once in the forward half, and a function of that seed, which backward may
compute again. The prims' own eager implementations ignore the seed, so a recomputed dropout would draw another mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from fxprec import compat


def draw_from_seeds(gm: GraphModule) -> GraphModule:
    """Replace, in place, random operators that ignore their seed; return ``gm``."""
    replaced = False
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _SEEDED:
            node.target = _SEEDED[node.target]
            replaced = True
    if replaced:
        gm.recompile()
    return gm


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed.sum()))


def seeded_random(
    size: Sequence[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return float32 numbers, uniform for mode ``"rand"`` and normal for ``"randn"``, the same for the same seed."""
    draw = {"rand": torch.rand, "randn": torch.randn}[mode]
    return draw(size, generator=_generator(seed), device=seed.device, dtype=torch.float32)


def seeded_randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers of [low, high), the same for the same seed."""
    return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)


_SEEDED = {compat.SEEDED_RANDOM: seeded_random, compat.SEEDED_RANDINT: seeded_randint}
