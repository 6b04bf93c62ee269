"""Find equal blocks in the sequence of a network's values, so that one decision can serve all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

_LEAST = 4  # the fewest values of a block


def find_repeats(traits: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Return runs of equal blocks as (first position, length of a block, number of blocks), longest first."""
    known: dict[Hashable, int] = {}
    ids = np.array([known.setdefault(trait, len(known)) for trait in traits])
    found: list[tuple[int, int, int]] = []
    while (best := _longest(ids)) is not None:
        found.append(best)
        first, size, blocks = best
        ids[first : first + size * blocks] = -1 - np.arange(first, first + size * blocks)  # equal to nothing
    return found


def _longest(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[int, int, int] | None:
    best = None
    for size in range(_LEAST, len(ids) // 2 + 1):
        is_equal = np.concatenate(([False], ids[:-size] == ids[size:], [False]))
        edges = np.flatnonzero(is_equal[1:] != is_equal[:-1]).reshape(-1, 2)  # where a run begins, and ends
        for first, end in edges.tolist():
            blocks = (end - first) // size + 1
            if blocks > 1 and (best is None or size * blocks > best[1] * best[2]):
                best = first, size, blocks
    return best


def groups_of(count: int, traits: Sequence[Hashable], most: int) -> list[int]:
    """Return a group for each of ``count`` values; equal blocks share groups so that about ``most`` are left.

    Neighbouring blocks share a group, because the first blocks' saved values wait longest.
    """
    groups = list(range(count))
    repeats = find_repeats(traits)
    once = count - sum(size * blocks for _, size, blocks in repeats)
    left = max(most - once, 0) / max(sum(size for _, size, _ in repeats), 1)
    for first, size, blocks in repeats:
        kinds = min(max(int(left), 1), blocks)
        for block in range(blocks):
            same = -(-(block * kinds // blocks) * blocks // kinds)  # the first block of its kind
            for i in range(size):
                groups[first + block * size + i] = first + same * size + i
    return groups
