"""Reduces a graph while it still fails: cuts its end, then its beginning, then ever smaller parts of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Graph, Node, map_arg

from fxprec.minify.piece import Piece

Fails = Callable[[Piece], bool]


def reduced(piece: Piece, fails: Fails) -> Piece:
    """Return a part of ``piece`` that still fails; no single operator of it can be removed. ``piece`` must fail."""
    before = None
    while before is None or len(piece.operators) < before:
        before = len(piece.operators)
        piece = _shortest_prefix(piece, fails)
        piece = _without_parts(piece, fails)
    return piece


def _shortest_prefix(piece: Piece, fails: Fails) -> Piece:
    """Bisect for the first operator that shows the failure if its result is the only output."""
    ends = [n.name for n in piece.operators if n.name in piece.values]
    good, bad = -1, len(ends)  # bad: the whole piece
    best = piece
    while bad - good > 1:
        middle = (good + bad) // 2
        candidate = ending_at(piece, ends[middle])
        if fails(candidate):
            bad, best = middle, candidate
        else:
            good = middle
    return best


def _without_parts(piece: Piece, fails: Fails) -> Piece:
    """Replace runs of operators by inputs, first half of all operators, then ever fewer (delta debugging)."""
    size = max(len(piece.operators) // 2, 1)
    while True:
        start = 0
        while start < len(piece.operators) - 1:  # the last operator makes the output
            names = [n.name for n in piece.operators[start : start + size]]
            candidate = without(piece, set(names[: len(piece.operators) - 1 - start]))
            if candidate is not None and fails(candidate):
                piece = candidate
            else:
                start += size
        if size == 1:
            return piece
        size = max(size // 2, 1)


def ending_at(piece: Piece, name: str) -> Piece:
    """Return the part of a piece that computes one node, which becomes the only output."""
    graph, kept = _copied(piece.graph)
    graph.output((next(new for old, new in kept.items() if old.name == name),))
    return _tidy(piece, graph)


def without(piece: Piece, names: set[str]) -> Piece | None:
    """Return the piece with these operators replaced by inputs; None if one of them gives no tensor and is used."""
    graph, kept = _copied(piece.graph)
    inputs = dict(piece.inputs)
    for old, new in kept.items():
        unused = not new.users and old not in piece.graph.output_node().all_input_nodes
        if old.name not in names or unused:
            continue
        if old.name not in piece.values:
            if any(user.name not in names for user in old.users):
                return None
            continue
        with graph.inserting_before(next(iter(graph.nodes))):
            made = graph.placeholder(f"{old.name}_in")
        new.replace_all_uses_with(made)
        inputs[made.name] = piece.values[old.name]
        kept[old] = made
    graph.output(map_arg(piece.graph.output_node().args[0], lambda n: kept[n]))
    return _tidy(replace(piece, inputs=inputs), graph)


def _copied(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Copy everything but the output, names included."""
    copy, kept = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node.op == "output":
            continue
        kept[node] = copy.node_copy(node, lambda n: kept[n])
    return copy, kept


def _tidy(piece: Piece, graph: Graph) -> Piece:
    """Remove what nothing uses, inputs too."""
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    graph.lint()
    names = {n.name for n in graph.find_nodes(op="placeholder")}
    inputs = {name: spec for name, spec in piece.inputs.items() if name in names}
    return replace(piece, graph=graph, inputs=inputs)
