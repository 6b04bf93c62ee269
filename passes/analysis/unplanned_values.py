"""Report values that no pass touches although the user might expect it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fxprec import compat
from fxprec.passes.analysis.joint import numel_hint, tensor_of, value
from fxprec.passes.analysis.operators import Operators
from fxprec.passes.base import Work
from fxprec.passes.notice import Notice
from fxprec.plan.lines import place


def notices_of_unplanned(work: Work, *, rounds_gradients: bool) -> Iterator[Notice]:
    """Yield a notice for the first complex value, the first float64 value, each nested graph, and a guessed size.

    With ``rounds_gradients`` also yield a notice for each sparse gradient, which is not rounded.
    """
    yield from _complex_values(work.operators)
    yield from _float64_values(work)
    yield from _nested_graphs(work.operators)
    yield from _guessed_sizes(work)
    if rounds_gradients:
        yield from _sparse_gradients(work)


def _complex_values(operators: Operators) -> Iterator[Notice]:
    for op in operators.all:
        for node in op.nodes:
            val = value(node)
            if val is not None and val.dtype.is_complex:
                where = place(node.name, op.module, op.source)
                yield Notice(where, f"is {val.dtype}: complex values are not planned and keep their precision")
                return


def _float64_values(work: Work) -> Iterator[Notice]:
    """Yield a notice for the first float64 input or operator result. Values inside an operator get none."""
    inputs = [(work.joint.describe(node).name, node) for node in work.joint.used_inputs]
    results = [(place(node.name, op.module, op.source), node) for op in work.operators.all for node in op.outputs]
    for where, node in (*inputs, *results):
        val = value(node)
        if val is not None and _is_float64(val):
            yield Notice(where, "is torch.float64: float64 values are not planned and keep their precision")
            return


def _is_float64(val: torch.Tensor) -> bool:
    """Return whether a tensor is float64 with more than one element; a single number is a constant or a metric."""
    return val.dtype == torch.float64 and numel_hint(val) > 1


def _nested_graphs(operators: Operators) -> Iterator[Notice]:
    seen: set[object] = set()
    for op in operators.all:
        for node in op.nodes:
            names = tuple(str(n.target) for n in node.all_input_nodes if _is_graph(n))
            if names and names not in seen:
                seen.add(names)
                detail = f"the code inside {node.target} is not planned and keeps the model's own precision"
                yield Notice(place(node.name, op.module, op.source), detail)


def _is_graph(node: Node) -> bool:
    owner = node.graph.owning_module
    return node.op == "get_attr" and isinstance(getattr(owner, str(node.target), None), GraphModule)


def _guessed_sizes(work: Work) -> Iterator[Notice]:
    """Yield a notice for the first size that a budget in bytes counts with a guess, since the data decides the size."""
    if not work.fits_peak and work.settings.activation_budget is None:
        return
    budget = "peak_budget" if work.fits_peak else "activation_budget"
    for op in work.operators.all:
        for node in op.outputs:
            guessed = {name: n for size in tensor_of(node).shape for name, n in compat.guessed_sizes(size).items()}
            for name, guess in guessed.items():
                detail = (
                    f"{budget} counts {guess} for {name}, a size that the data decides and nothing bounds, so a larger "
                    "one may exceed the budget; bound it in the model, as by torch._check(n <= 512)"
                )
                yield Notice(place(node.name, op.module, op.source), detail)
                return


def _sparse_gradients(work: Work) -> Iterator[Notice]:
    for node, (_, gradient) in work.joint.gradients.items():
        val = value(gradient)
        if val is not None and val.layout is not torch.strided:
            given = work.joint.describe(node)
            yield Notice(given.name, f"its gradient is {val.layout}: it is not rounded and keeps its precision")
