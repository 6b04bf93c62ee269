"""Build choices that keep one value of each equal block and recompute the rest, as a user's checkpoints do.

A search may miss these choices under a tight budget: its rows only estimate the live bytes of choices far from the
replayed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Node

from fxprec.passes.analysis.ways import Form
from fxprec.passes.crossings.problem import Problem, Ways
from fxprec.passes.crossings.repeats import find_repeats
from fxprec.passes.forms.low import Low
from fxprec.passes.forms.own import Own


def checkpoints(problem: Problem, kept: Ways) -> Iterator[Ways]:
    """Yield choices for each position in a block; ``kept`` has the ways of values outside the equal blocks."""
    nodes = problem.nodes
    for first, size, blocks in find_repeats([problem.trait(node) for node in nodes]):
        inside = set(nodes[first : first + size * blocks])
        outside = {node: way for node, way in kept.items() if isinstance(way, Form) and node not in inside}
        seen = list[Ways]()
        for at in range(first, first + size):
            for kind in (Own, Low):
                ends = dict(_kept_as(kind, nodes[at : first + size * blocks : size], problem))
                ways = problem.completed(outside | ends)
                if ways is not None and ways not in seen:
                    seen.append(ways)
                    yield ways


def _kept_as(kind: type[Form], nodes: Iterable[Node], problem: Problem) -> Iterator[tuple[Node, Form]]:
    """Yield (value, form) for each value that can be kept: a form of class ``kind`` if it has one, else its first."""
    for node in nodes:
        forms = [way for way in problem.ways(node) if isinstance(way, Form)]
        of_kind = [form for form in forms if isinstance(form, kind)]
        yield from ((node, form) for form in (of_kind or forms)[:1])
