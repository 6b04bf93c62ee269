"""A graph with every kind of kernel around a GEMM."""

from __future__ import annotations

import torch
import torch.fx.passes.fake_tensor_prop
from torch import Tensor
from torch.fx import Graph, GraphModule

from fxprec.ir import symbolic
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import format_row


def table_of(*rows: tuple[int, str], carried: int = 0, measure: int = 0) -> Tensor:
    found = [[exp, *format_row(parse(fmt))[1:], carried, measure] for exp, fmt in rows]
    return torch.tensor(found, dtype=torch.int32)


def half_graph(table: Tensor) -> GraphModule:
    """x -> quantize -> (codes, transpose); dy likewise; dW = dy^T x; a product that is stored in codes; statistics."""
    graph = Graph()
    x, dy, t = (graph.placeholder(name) for name in ("x", "dy", "table"))
    call = graph.call_function
    q = call(symbolic.QUANTIZE, (x, t, 0, "e4m3fn", "native"))
    qd = call(symbolic.QUANTIZE, (dy, t, 1, "e5m2_sat", "native"))
    kept = call(symbolic.KEEP_NONFINITE, (qd, dy))
    turned, turned_dy = call(symbolic.TRANSPOSED, (q,)), call(symbolic.TRANSPOSED, (kept,))
    b = call(torch.ops.aten.permute.default, (turned, [1, 0]))
    args = (turned_dy, b, None, t, 1, -1, "e5m2_sat", "e4m3fn", torch.float32)
    dw = call(symbolic.GEMM, (*args, "native", True))
    y = call(symbolic.GEMM, (*args, "generated", False))
    qy = call(symbolic.QUANTIZE, (y, t, 2, "1-5-2", "packed"))
    graph.output((q, turned, turned_dy, dw, qy))
    gm = GraphModule(torch.nn.Module(), graph)
    torch.fx.passes.fake_tensor_prop.FakeTensorProp(gm).propagate(torch.empty(64, 32), torch.empty(64, 48), table)
    return gm
