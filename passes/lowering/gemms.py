"""Lower the symbolic GEMM ops: to Triton kernels on a GPU (and in Triton's interpreter), elsewhere to ATen."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec import compat
from fxprec.ir import symbolic
from fxprec.ir import symbolic_gemms as gemms
from fxprec.passes.lowering.expand import insert
from fxprec.passes.lowering.gemm_casts import call, codes_of_product, copy_with_codes, find, replace
from fxprec.passes.lowering.stats import Counters

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default


def runs_triton(device_type: str) -> bool:
    """Say whether Triton kernels run on tensors of this device here."""
    if device_type == "cuda":
        return True
    return importlib.util.find_spec("triton") is not None and compat.triton_interprets()


def lower_gemms(
    gm: GraphModule,
    device_type: str,
    scaled: frozenset[int],
    counters: Counters,
    without: Collection[str] = (),
) -> None:
    """Replace ``gemm``, ``transposed`` and the casts that their kernels take over.

    ``scaled`` are the rows whose scale exponent may differ from 0; ``counters`` learns for which rows the kernels
    count; ``without`` names kernels that do not compile (`gemms.GemmKernel.name`). Runs before the casts are expanded.
    """
    graph, triton = gm.graph, runs_triton(device_type)
    copies, products = find(graph, gemms.TRANSPOSED), find(graph, gemms.GEMM)
    if not copies and not products:
        return
    scales = _Scales(graph, scaled)
    for copy in copies:
        if not (triton and copy_with_codes(graph, copy, counters, without)):
            _copy(graph, copy, triton and gemms.GemmKernel("transpose").name not in without)
    for node in products:
        if node.args[-1] == "native":
            _native(graph, node, scales)
        elif triton and gemms.GemmKernel("gemm", node.args[6:8]).name not in without:  # type: ignore[arg-type]
            _generated(graph, node, counters, without)
        else:
            _decoded(graph, node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or node in counters)
    gm.recompile()


class _Scales:
    """``2**-exponent`` of rows as float32: one small kernel a graph, of which each GEMM gets a view."""

    def __init__(self, graph: Graph, scaled: frozenset[int]) -> None:
        self.graph, self.scaled = graph, scaled
        self.inverse: Node | None = None
        self.ones: list[Node] = []

    def of(self, table: Node, row: int, before: Node) -> Node:
        if row not in self.scaled:  # AS_STORED is not
            if not self.ones:
                options = {"dtype": torch.float32, "device": table.meta["val"].device}
                with self.graph.inserting_before(_first(self.graph)):
                    self.ones.append(self.graph.call_function(aten.full.default, ([], 1.0), options))
            return self.ones[0]
        if self.inverse is None:
            with self.graph.inserting_before(_first(self.graph)):
                self.inverse = insert(self.graph, _inverse_scales, table)
        with self.graph.inserting_before(before):
            return call(self.graph, aten.select.int, self.inverse, 0, row)


def _inverse_scales(table: torch.Tensor, _: object) -> torch.Tensor:
    """Return ``2.0**-exponent`` of every row, written as a float's bits."""
    return ((127 - table[:, 0]) << 23).view(torch.float32)


def _first(graph: Graph) -> Node:
    first: Node = next(n for n in graph.nodes if n.op != "placeholder")
    return first


def _copy(graph: Graph, copy: Node, triton: bool) -> None:
    (code,) = copy.args
    with graph.inserting_before(copy):
        if triton:
            new = call(graph, gemms.TRANSPOSE_CODES, code)
        else:
            matrix = call(graph, aten.view.default, code, [-1, int(copy.meta["val"].shape[0])])
            turned = call(graph, aten.permute.default, matrix, [1, 0])
            new = graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    replace(graph, copy, new)


def _native(graph: Graph, node: Node, scales: _Scales) -> None:
    args: tuple[Any, ...] = node.args
    a, b, bias, table, row_a, row_b, _, _, dtype, _ = args
    factors = [scales.of(table, row, node) for row in (row_a, row_b)]
    fused = bias is not None and dtype != torch.float32  # cuBLASLt adds no float32 bias
    with graph.inserting_before(node):
        if fused and bias.meta["val"].dtype != dtype:
            bias = call(graph, _CONVERT, bias, dtype)
        new = call(graph, aten._scaled_mm.default, a, b, *factors, bias if fused else None, None, dtype)
        if bias is not None and not fused:
            new = call(graph, aten.add.Tensor, new, bias)
    replace(graph, node, new)


def _generated(graph: Graph, node: Node, counters: Counters, without: Collection[str]) -> None:
    if codes_of_product(graph, node, counters, without):
        return
    with graph.inserting_before(node):
        new = call(graph, gemms.MATMUL_CODES, *node.args[:-1])
    replace(graph, node, new)


def _decoded(graph: Graph, node: Node) -> None:
    """Decode, then multiply in float32, as without this GEMM."""
    args: tuple[Any, ...] = node.args
    a, b, bias, table, row_a, row_b, fmt_a, fmt_b, dtype, _ = args
    with graph.inserting_before(node):
        wide = []
        for q, row, fmt in ((a, row_a, fmt_a), (b, row_b, fmt_b)):
            wide.append(call(graph, symbolic.DEQUANTIZE, q, table, row, fmt, "packed", torch.float32))
            wide[-1].meta["val"] = q.meta["val"].to(torch.float32)
        new = call(graph, aten.mm.default, *wide)
        if bias is not None:
            new = call(graph, aten.add.Tensor, new, bias)
        if dtype != torch.float32:
            new = call(graph, _CONVERT, new, dtype)
    replace(graph, node, new)
