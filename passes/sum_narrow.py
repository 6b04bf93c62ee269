"""Make sums read the bfloat16 copy of a gradient that GEMMs multiply, as autocast does for a bias's gradient.

A sum over rows is a loop of its own and reads from memory, so the float32 gradient would be written for the sum alone.
The sum itself stays in float32. If the model or its autocast converts the gradient, the graph already says which copy
is summed. Such a graph is left as it is: for a table of positions, autocast sums the float32 gradient beside the
conversion.

A ReLU's mask is treated in the same way. ReLU's result is compared with 0, and the next GEMM multiplies that result in
bfloat16. The bfloat16 copy is 0 where the result is 0. The float32 result would be written for the mask alone: in
forward, where the mask is packed, or in the backward of a recomputed region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fxprec.ir.operators import Trait, having
from fxprec.passes.analysis import ops, regions
from fxprec.passes.analysis.joint import argument, input_at, is_backward, is_view, readers, tensor_of, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import emit, emit_on

aten = torch.ops.aten
_COMPARISONS = having(Trait.TESTS_ABOVE) | having(Trait.TESTS_BELOW)


@dataclass(frozen=True)
class SumNarrow(Pass):
    """Make sums over all but the last dimension, and comparisons with 0, read the bfloat16 copy where there is one."""

    name: str = "sum-narrow"

    def apply(self, work: Work) -> None:
        graph = work.joint.graph
        for narrow in graph.find_nodes(op="call_function", target=CONVERT):
            wide = input_at(narrow, 0)
            if tensor_of(narrow).dtype != torch.bfloat16 or tensor_of(wide).dtype != torch.float32:
                continue
            if work.joint.in_backward(wide):
                if not _is_traced(narrow):
                    _read_by_sums(graph, wide, narrow)
            elif not is_backward(narrow):
                _read_by_masks(work, wide, narrow)


def _read_by_masks(work: Work, wide: Node, narrow: Node) -> None:
    """Let comparisons of ``wide`` with 0 that backward reads compare ``narrow``, behind which they move."""
    for shown, mask in list(readers(wide, lambda user: user.target in ops.ALIASES)):
        if mask.target not in _COMPARISONS or argument(mask, 1) != 0:
            continue
        if is_backward(mask) and regions.is_marked_recompute(wide):
            mask.replace_input_with(shown, narrow)
        elif mask in work.comparisons and all(map(is_backward, mask.users)):
            mask.replace_input_with(shown, narrow)
            narrow.append(mask)


def _is_traced(conversion: Node) -> bool:
    """Return whether the model or its autocast converts: nodes that passes insert have no ``original_aten``."""
    return "original_aten" in conversion.meta


def _read_by_sums(graph: Graph, wide: Node, narrow: Node) -> None:
    for total, shown in list(_sums_over_rows(wide, ())):
        if total < narrow:
            continue
        read = narrow
        with graph.inserting_before(total):
            for view in shown:
                read = emit_on(graph, view, read, val=view.meta["val"].to(torch.bfloat16))
            source = shown[-1] if shown else wide
            read = emit(graph, CONVERT, (read, torch.float32), total, val=source.meta["val"])
        total.replace_input_with(source, read)


def _sums_over_rows(x: Node, shown: tuple[Node, ...]) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Yield (sum, views between) for each sum of ``x`` that keeps the last dimension."""
    for user in x.users:
        if user.target is aten.sum.dim_IntList and _keeps_last(user):
            yield user, shown
        elif is_view(user) and len(user.all_input_nodes) == 1 and value(user) is not None:
            yield from _sums_over_rows(user, (*shown, user))


def _keeps_last(total: Node) -> bool:
    rank, dims = tensor_of(input_at(total, 0)).dim(), argument(total, 1)
    return isinstance(dims, list | tuple) and bool(dims) and all(isinstance(d, int) and (d + 1) % rank for d in dims)
