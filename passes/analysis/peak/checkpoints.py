"""Choices that keep one value of each equal block and compute the rest of the block again, as a user's checkpoints do.

A search that ends with nothing within a tight budget may miss them: what its rows say of a moment is a guess for
choices far from the one that was replayed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from fxprec.passes.analysis.peak.problem import KEEP, NARROW, Problem, Ways, is_kept
from fxprec.passes.analysis.peak.repeats import find_repeats


def checkpoints(problem: Problem, kept: Ways) -> Iterator[Ways]:
    """Yield choices for each position in a block; ``kept`` says what is done outside of the equal blocks."""
    nodes = problem.nodes
    for first, size, blocks in find_repeats([problem.trait(node) for node in nodes]):
        inside = set(nodes[first : first + size * blocks])
        outside = {node: way for node, way in kept.items() if is_kept(way) and node not in inside}
        seen = list[Ways]()
        for at in range(first, first + size):
            for way in (KEEP, NARROW):
                ends: dict[Node, int] = dict.fromkeys(nodes[at : first + size * blocks : size], way)
                ways = problem.completed(outside | ends)
                if ways is not None and ways not in seen:
                    seen.append(ways)
                    yield ways
