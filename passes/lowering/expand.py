"""Lowering ``inductor``: symbolic ops become a few decomposed ATen ops that Inductor fuses.

Each expansion is a Python function over tensors, traced once per format with ``make_fx`` and copied in for every
site: pointwise ops know no shapes, so one trace serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec import codec, symbolic
from fxprec.formats import parse

aten = torch.ops.aten


def expand(gm: GraphModule, scaled: frozenset[int]) -> None:
    """Replace every symbolic node of ``gm``. ``scaled`` are the sites whose scale exponent may differ from 0."""
    for node in list(gm.graph.nodes):
        recipe = _RECIPES.get(node.target)
        if recipe is None:
            continue
        with gm.graph.inserting_before(node):
            function, static, columns = recipe(node, scaled)
            template = _traced(function, _dtype(node.args[0]), static, len(columns))
            row = [_column(gm.graph, node.args[1], node.args[2], column) for column in columns]
            new = _inline(gm.graph, template, (node.args[0], *row))
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


_Recipe = tuple[Callable[..., torch.Tensor], tuple[Any, ...], tuple[int, ...]]


def _quantize_recipe(node: Node, scaled: frozenset[int]) -> _Recipe:
    _, _, site, fmt, storage = node.args
    if storage == "simulate":
        return _simulate, (site in scaled,), tuple(range(8))
    return _quantize, (fmt, storage, site in scaled), (0,) if site in scaled else ()


def _dequantize_recipe(node: Node, scaled: frozenset[int]) -> _Recipe:
    _, _, site, fmt, _, dtype = node.args
    return _dequantize, (fmt, dtype, site in scaled), (0,) if site in scaled else ()


def _stats_recipe(node: Node, scaled: frozenset[int]) -> _Recipe:
    x, _, site, fmt = node.args
    assert isinstance(x, Node)
    simulated = any(u.target is symbolic.QUANTIZE and u.args[4] == "simulate" for u in x.users)
    if simulated:
        return _simulated_stats, (site in scaled,), (0, 1, 5, 7)
    return _static_stats, (fmt, site in scaled), (0,) if site in scaled else ()


def _rescale_recipe(node: Node, scaled: frozenset[int]) -> _Recipe:
    return _rescale, (), (0,)


_RECIPES: dict[object, Callable[[Node, frozenset[int]], _Recipe]] = {
    symbolic.QUANTIZE: _quantize_recipe,
    symbolic.DEQUANTIZE: _dequantize_recipe,
    symbolic.SITE_STATS: _stats_recipe,
    symbolic.RESCALE: _rescale_recipe,
}


def _dtype(node: object) -> torch.dtype:
    assert isinstance(node, Node)
    val = node.meta["val"]
    assert isinstance(val, torch.Tensor)
    return val.dtype


def _column(graph: Graph, table: object, site: object, column: int) -> Node:
    row = graph.call_function(aten.select.int, (table, 0, site))  # type: ignore[arg-type]
    return graph.call_function(aten.select.int, (row, 0, column))


def _inline(graph: Graph, template: GraphModule, args: tuple[Any, ...]) -> Node:
    placeholders = template.graph.find_nodes(op="placeholder")
    mapping: dict[Node, Node] = dict(zip(placeholders, args, strict=True))
    result = graph.graph_copy(template.graph, mapping)
    assert isinstance(result, Node)
    return result


@lru_cache(maxsize=1024)
def _traced(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, static: tuple[Any, ...], num_columns: int
) -> GraphModule:
    """Trace ``function(x, *columns, *static)`` on a small example; the trace holds for every shape."""
    example = torch.zeros(2, 3, dtype=torch.float32).to(dtype)
    columns = [torch.zeros((), dtype=torch.int32) for _ in range(num_columns)]

    def call(x: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
        return function(x, columns, *static)

    return make_fx(call, decomposition_table=select_decomp_table())(example, *columns)


_Columns = tuple[torch.Tensor, ...]


def _scale(x: torch.Tensor, columns: _Columns, scaled: bool, sign: int = 1) -> torch.Tensor:
    """Multiply by ``2.0 ** (sign * columns[0])``, the power written as a float's bits."""
    if not scaled:
        return x
    exponent = columns[0] if sign > 0 else -columns[0]
    return x * ((exponent + 127) << 23).view(torch.float32)


def _simulate(x: torch.Tensor, columns: _Columns, scaled: bool) -> torch.Tensor:
    return codec.round_with_row(_scale(x.to(torch.float32), columns, scaled), *columns[1:])


def _quantize(x: torch.Tensor, columns: _Columns, fmt: str, storage: str, scaled: bool) -> torch.Tensor:
    x = _scale(x.to(torch.float32), columns, scaled)
    form = parse(fmt)
    dtype = symbolic.stored_dtype(form, storage)
    if not dtype.is_floating_point:
        return codec.encode_bits(x, form)
    if form.overflow == "saturate":
        x = torch.clamp_max(torch.clamp_min(x, -form.largest), form.largest)
    return x.to(dtype)


def _dequantize(q: torch.Tensor, columns: _Columns, fmt: str, dtype: torch.dtype, scaled: bool) -> torch.Tensor:
    x = q.to(torch.float32) if q.dtype.is_floating_point else codec.decode_bits(q, parse(fmt))
    return _scale(x, columns, scaled, sign=-1).to(dtype)


def _rescale(g: torch.Tensor, columns: _Columns) -> torch.Tensor:
    return _scale(g.to(torch.float32), columns, True).to(g.dtype)


def _static_stats(x: torch.Tensor, columns: _Columns, fmt: str, scaled: bool) -> torch.Tensor:
    form = parse(fmt)
    row = codec.format_row(form)
    return _stats(x, columns, scaled, codec.overflow_threshold(row.shift, row.largest), row.underflow)


def _simulated_stats(x: torch.Tensor, columns: _Columns, scaled: bool) -> torch.Tensor:
    _, shift, largest, underflow = columns
    threshold = codec.overflow_threshold(shift, largest)
    assert isinstance(threshold, torch.Tensor)
    return _stats(x, columns, scaled, threshold, underflow)


def _stats(
    x: torch.Tensor,
    columns: _Columns,
    scaled: bool,
    overflow: int | torch.Tensor,
    underflow: int | torch.Tensor,
) -> torch.Tensor:
    """Compare magnitudes as integers: float32 bits are ordered, and NaN lies above infinity."""
    wide = x.to(torch.float32)
    bits = _scale(wide, columns, scaled).view(torch.int32) & 0x7FFFFFFF
    over = (bits >= overflow).to(torch.float32)
    under = ((bits > 0) & (bits <= underflow)).to(torch.float32)
    return torch.stack([torch.mean(over), torch.mean(under), torch.amax(torch.abs(wide))])
