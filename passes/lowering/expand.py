"""Lowering ``inductor``: symbolic operators become a few decomposed ATen operators that Inductor fuses.

Each expansion is a Python function over tensors. ``make_fx`` traces it once per format, and the trace is copied into
the graph for every site: pointwise operators do not depend on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec import compat
from fxprec.ir.calls import call_of
from fxprec.ir.symbolic import (
    CARRIED,
    MEASURE,
    Count,
    Dequantize,
    KeepCodes,
    KeepNonfinite,
    Quantize,
    Rescale,
    stored_dtype,
)
from fxprec.kernels.counts import Gathered, Ln
from fxprec.numerics import codec, formats, stats
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.rows import INFINITY, MAGNITUDE, FormatRow, format_row, row_of
from fxprec.numerics.trace import drop_aliases
from fxprec.passes.analysis.joint import dim_hint, tensor_of
from fxprec.passes.sites import replace_node

aten = torch.ops.aten


def expand(
    gm: GraphModule,
    scaled: frozenset[int],
    measured: frozenset[int] = frozenset(),
    without: Collection[object] = (),
) -> None:
    """Replace every symbolic node of ``gm`` that has an expansion, except operators and nodes in ``without``.

    ``scaled`` are rows whose scale exponent may differ from 0, ``measured`` rows whose moments are counted.
    """
    device = _device(gm.graph)
    rows = Rows(scaled, measured)
    for node in list(gm.graph.nodes):
        recipe = _RECIPES.get(node.target)
        if recipe is None or node.target in without or node in without:
            continue
        with gm.graph.inserting_before(node):
            function, static, columns = recipe(node, rows)
            template = _traced(function, tuple(map(_dtype, _tensors(node))), static, len(columns))
            row = [_column(gm.graph, node, column) for column in columns]
            new = inline(gm.graph, template, (*_tensors(node), *row), device)
        replace_node(node, new)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _device(graph: Graph) -> torch.device:
    """Return the device of the graph's inputs; nodes that were inlined have values on a CPU."""
    values = (n.meta.get("val") for n in graph.find_nodes(op="placeholder"))
    devices = [v.device for v in values if isinstance(v, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


@dataclass(frozen=True)
class Rows:
    """Rows of the scale table that are scaled, and rows whose moments are measured."""

    scaled: frozenset[int]
    measured: frozenset[int]


_Recipe = tuple[Callable[..., torch.Tensor], tuple[Any, ...], tuple[int, ...]]
_FORMAT_COLUMNS = tuple(range(CARRIED))


def _quantize_recipe(node: Node, rows: Rows) -> _Recipe:
    cast = Quantize.of(node)
    scaled = cast.row in rows.scaled
    if cast.is_simulated:
        return _simulate, (scaled,), _FORMAT_COLUMNS
    return _quantize, (cast.format, cast.storage, scaled), (0,) if scaled else ()


def _dequantize_recipe(node: Node, rows: Rows) -> _Recipe:
    read = Dequantize.of(node)
    scaled = read.row in rows.scaled
    return _dequantize, (read.format, read.dtype, scaled), (0,) if scaled else ()


def _counts_recipe(node: Node, rows: Rows) -> _Recipe:
    count = Count.of(node)
    simulated = any(cast.is_simulated for _, cast in Quantize.among(count.x.users))
    dims = _row_dims(tensor_of(count.x))
    static = (None if simulated else count.format, count.row in rows.scaled, count.row in rows.measured, dims)
    columns = _FORMAT_COLUMNS if simulated else ()
    return _counts, static, (0, CARRIED, MEASURE, *columns[1:])


_RECIPES: dict[object, Callable[[Node, Rows], _Recipe]] = {
    Quantize.target: _quantize_recipe,
    Dequantize.target: _dequantize_recipe,
    Count.target: _counts_recipe,
    Gathered.target: lambda node, rows: (_gathered, (), ()),
    Rescale.target: lambda node, rows: (_rescale, (), (0,)),
    KeepNonfinite.target: lambda node, rows: (_keep_nonfinite, (), ()),
    KeepCodes.target: lambda node, rows: (_keep_codes, (KeepCodes.of(node).format,), ()),
}


def _tensors(node: Node) -> tuple[Node, ...]:
    """Return the tensors that a symbolic node reads, without the table."""
    call = call_of(node)
    return tuple(getattr(call, name) for name in call.tensors())


def _dtype(node: Node) -> torch.dtype:
    return tensor_of(node).dtype


def _column(graph: Graph, node: Node, column: int) -> Node:
    """Read a column of the table's row that a symbolic node names."""
    call: Any = call_of(node)  # with a table and a row
    return column_of(graph, call.table, call.row, column)


def column_of(graph: Graph, table: Node, row: int, column: int) -> Node:
    """Insert a read of one number of the table."""
    return graph.call_function(aten.select.int, (graph.call_function(aten.select.int, (table, 0, row)), 0, column))


def inline(graph: Graph, template: GraphModule, args: tuple[object, ...], device: torch.device) -> Node:
    """Copy a template into the graph, with its constants on ``device``: one on a CPU would prevent CUDA graphs."""
    result = copied_in(graph, template, args, device)
    assert isinstance(result, Node)
    return result


def copied_in(graph: Graph, template: GraphModule, args: tuple[Any, ...], device: torch.device) -> Any:
    """Copy a template with any results into the graph, and return its results."""
    placeholders = template.graph.find_nodes(op="placeholder")
    mapping: dict[Node, Node] = dict(zip(placeholders, args, strict=True))
    result = graph.graph_copy(template.graph, mapping)
    for node in mapping.values():
        if ("device" in node.kwargs or node.target is aten.scalar_tensor.default) and node not in args:
            node.kwargs = {**node.kwargs, "device": device}
    return result


def counted_parts(
    graph: Graph,
    count: Count,
    x: Node,
    dims: tuple[int, ...],
    fmt: str | None,
    scaled: bool,
    measured: bool,
    short: bool,
) -> tuple[Node, ...]:
    """Insert counts of the parts of ``x`` that reducing ``dims`` leaves (`stats.count_parts`), instead of ``count``."""
    columns = _FORMAT_COLUMNS if fmt is None else ((0,) if scaled else ())
    row = [column_of(graph, count.table, count.row, column) for column in columns]
    template = _traced(_parts, (_dtype(x),), (fmt, dims, scaled, measured, short), len(row))
    parts: tuple[Node, ...] = copied_in(graph, template, (x, *row), tensor_of(x).device)
    return parts


def insert(graph: Graph, function: Callable[..., torch.Tensor], x: Node, *static: object) -> Node:
    """Insert ``function(x, (), *static)``, decomposed as Inductor needs it, at the graph's insertion point."""
    return inline(graph, _traced(function, (_dtype(x),), static, 0), (x,), _device(graph))


@lru_cache(maxsize=1024)
def _traced(
    function: Callable[..., torch.Tensor], dtypes: tuple[torch.dtype, ...], static: tuple[object, ...], num_columns: int
) -> GraphModule:
    """Trace ``function(*tensors, columns, *static)`` on a small example; the trace holds for every shape."""
    examples = [torch.zeros(_EXAMPLES.get(function, (2, 3)), dtype=dtype, device="cpu") for dtype in dtypes]
    columns = [torch.zeros((), dtype=torch.int32, device="cpu") for _ in range(num_columns)]

    def call(*args: torch.Tensor) -> torch.Tensor:
        return function(*args[: len(dtypes)], args[len(dtypes) :], *static)

    traced = make_fx(call, decomposition_table=compat.decompositions())(*examples, *columns)
    drop_aliases(traced.graph)
    return traced


_Columns = tuple[torch.Tensor, ...]


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return ``2.0**exponent`` by writing the bits of a float32."""
    return ((exponent + 127) << 23).view(torch.float32)


def _scale(x: torch.Tensor, columns: _Columns, scaled: bool, sign: int = 1) -> torch.Tensor:
    """Multiply by ``2.0 ** (sign * columns[0])``."""
    return x * _power(columns[0] if sign > 0 else -columns[0]) if scaled else x


def _simulate(x: torch.Tensor, columns: _Columns, scaled: bool) -> torch.Tensor:
    return codec.nearest(_scale(x.to(torch.float32), columns, scaled), row_of(columns))


def _quantize(x: torch.Tensor, columns: _Columns, fmt: str, storage: str, scaled: bool) -> torch.Tensor:
    form = parse(fmt)
    dtype = stored_dtype(form, storage)
    if x.dtype == dtype and form.overflow == "inf" and not scaled:
        return x
    x = _scale(x.to(torch.float32), columns, scaled)
    if not dtype.is_floating_point:
        return codec.encode_bits(x, form)
    if form.overflow == "saturate":
        return _saturated(x, form.largest).to(dtype)
    if form.bits > 8:
        return x.to(dtype)
    return codec.encode_bits(x, form).view(dtype)  # an 8-bit cast's overflow depends on torch and the device


def _saturated(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Clamp, but keep NaN. Minima and maxima beside stores of bytes fail on some GPUs (triton issue 11111)."""
    return torch.where(x > largest, largest, torch.where(x < -largest, -largest, x))


def _dequantize(q: torch.Tensor, columns: _Columns, fmt: str, dtype: torch.dtype, scaled: bool) -> torch.Tensor:
    if q.dtype == dtype and not scaled:
        return q  # a conversion through float32 would be a kernel that copies
    x = q.to(torch.float32) if q.dtype.is_floating_point else codec.decode_bits(q, parse(fmt))
    return _scale(x, columns, scaled, sign=-1).to(dtype)


def _keep_nonfinite(rounded: torch.Tensor, x: torch.Tensor, columns: _Columns) -> torch.Tensor:
    wide = x.to(torch.float32)
    if rounded.dtype in KEPT_CODES:
        return _with_specials(rounded, wide, KEPT_CODES[rounded.dtype])
    return torch.where((wide.view(torch.int32) & MAGNITUDE) < INFINITY, rounded, x.to(rounded.dtype))


# Codes of inf and of NaN. They are written explicitly, since casts of inf saturate on some devices.
KEPT_CODES = {torch.float8_e5m2: formats.E5M2, torch.float8_e4m3fn: formats.E4M3FN}


def _keep_codes(rounded: torch.Tensor, x: torch.Tensor, columns: _Columns, fmt: str) -> torch.Tensor:
    return _with_specials(rounded, x.to(torch.float32), parse(fmt))


def _with_specials(rounded: torch.Tensor, wide: torch.Tensor, fmt: Format) -> torch.Tensor:
    bits = wide.view(torch.int32)
    magnitude = bits & MAGNITUDE
    inf, nan, sign = formats.kept_codes(fmt)
    special = inf + (nan - inf) * (magnitude > INFINITY).to(torch.int32)  # `where` of two ints has 64 bits
    special = special | ((bits >> 31) & sign)
    code = rounded.view(fmt.code_dtype).to(torch.int32)
    return torch.where(magnitude < INFINITY, code, special).to(fmt.code_dtype).view(rounded.dtype)


def _rescale(g: torch.Tensor, columns: _Columns) -> torch.Tensor:
    return _scale(g.to(torch.float32), columns, True).to(g.dtype)


def _counts(
    x: torch.Tensor, columns: _Columns, fmt: str | None, scaled: bool, measured: bool, dims: tuple[int, ...]
) -> torch.Tensor:
    row = FormatRow(columns[0], *columns[3:]) if fmt is None else format_row(parse(fmt))
    wide = x.to(torch.float32)
    stored = _scale(wide, columns, scaled)
    lost = stats.count(wide, stored, row, dims)
    moments = stats.count_moments(stored, dims) if measured else []
    carried = columns[1].to(torch.float64)
    zero = carried * 0.0  # on the graph's device; a constant made here would be on a CPU
    unmeasured = torch.stack([zero + value for value in stats.UNMEASURED])
    totals = stats.total(lost + moments)
    if measured:
        lost_found, found = totals.split([len(lost), len(moments)])
        totals = torch.cat([lost_found, torch.where(columns[2] > 0, found, unmeasured)])
    moments_exp = (columns[0] + columns[1]).to(torch.float64) if scaled else carried
    return torch.cat([totals, *([] if measured else [unmeasured]), torch.stack([carried, moments_exp])])


def _parts(
    x: torch.Tensor,
    columns: _Columns,
    fmt: str | None,
    dims: tuple[int, ...],
    scaled: bool,
    measured: bool,
    short: bool,
) -> tuple[torch.Tensor, ...]:
    row, wide = FormatRow(*columns) if fmt is None else format_row(parse(fmt)), x.to(torch.float32)
    compat.takes_approximate_logarithm(Ln.target)
    return stats.count_parts(wide, _scale(wide, columns, scaled), row, dims, measured, short, Ln.target)


_ROW = 256  # elements; the 32 bytes of partial counts per row are then a small share


def _row_dims(x: torch.Tensor) -> tuple[int, ...]:
    """Return the last dimensions that form a row, which one program counts while it computes the values; () for all.

    Inductor splits a reduction of all elements into parts that do not fuse with the kernel that computes the values.
    The values would be written and read again. A sum over rows fuses with every kernel that walks a tensor in order.
    """
    if not x.is_contiguous():
        return ()
    for count in range(1, min(x.ndim, MOST_DIMS)):
        if math.prod(dim_hint(size) for size in x.shape[-count:]) >= _ROW:
            return tuple(range(-count, 0))
    return ()


def _gathered(counters: torch.Tensor, columns: _Columns) -> torch.Tensor:
    return stats.gathered(counters).view(-1)


MOST_DIMS = 5
# Shapes of the traced examples; functions without an entry are pointwise.
_EXAMPLES = {_gathered: (2 * stats.SITE_COUNTERS,), _counts: (2,) * MOST_DIMS, _parts: (2,) * MOST_DIMS}
