"""Lower the symbolic GEMMs: to Triton kernels on a GPU (and in Triton's interpreter), elsewhere to ATen."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec import compat
from fxprec.ir.symbolic import CodedGemm, Dequantize, InMemory, Transposed
from fxprec.kernels.coded_gemms import GemmKernel, MatmulCodes, TransposeCodes, native_name
from fxprec.passes.analysis.joint import behind_inputs, tensor_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.lowering.expand import insert
from fxprec.passes.lowering.gemm_casts import call, codes_of_product, copy_with_codes, substitute
from fxprec.passes.lowering.stats import Counters

aten = torch.ops.aten


def runs_triton(device_type: str) -> bool:
    """Return whether Triton kernels can run on tensors of this device in this process."""
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

    ``scaled`` are the rows whose scale exponent may differ from 0. ``counters`` is given the rows for which the kernels
    count. ``without`` names kernels that do not compile (`gemms.GemmKernel.name`). Runs before the casts are expanded.
    """
    graph, triton = gm.graph, runs_triton(device_type)
    copies, products = Transposed.nodes(graph), CodedGemm.nodes(graph)
    if not copies and not products:
        return
    scales = _Scales(graph, scaled)
    for copy in copies:
        if not (triton and copy_with_codes(graph, copy, counters, without)):
            _copy(graph, copy, triton and GemmKernel("transpose").name not in without)
    for node, gemm in CodedGemm.among(products):
        if gemm.kernel == "native" and native_name(tensor_of(gemm.a), tensor_of(gemm.b)) not in without:
            _native(graph, node, gemm, scales)
        elif gemm.kernel == "native" or not triton or GemmKernel("gemm", gemm.formats).name in without:
            _decoded(graph, node, gemm)
        elif not codes_of_product(graph, node, counters, without):
            with graph.inserting_before(node):
                new = MatmulCodes.like(gemm).insert(graph)
            substitute(graph, node, new)
    graph.eliminate_dead_code(lambda node: node.is_impure() or node in counters)
    gm.recompile()


class _Scales:
    """``2**-exponent`` of all rows as float32, from one small kernel per graph. Each GEMM gets a (1, 1) view of it.

    Of bits that are not in memory as float32, Inductor copies each number in a kernel of its own. A view without
    dimensions fails in torch 2.13's code for `torch._scaled_mm`.
    """

    def __init__(self, graph: Graph, scaled: frozenset[int]) -> None:
        self.graph, self.scaled = graph, scaled
        self.inverse: Node | None = None
        self.ones: list[Node] = []

    def of(self, table: Node, row: int, before: Node) -> Node:
        if row not in self.scaled:  # AS_STORED is not in it
            if not self.ones:
                options = {"dtype": torch.float32, "device": table.meta["val"].device}
                with self.graph.inserting_before(behind_inputs(self.graph)):
                    self.ones.append(self.graph.call_function(aten.full.default, ([1, 1], 1.0), options))
            return self.ones[0]
        if self.inverse is None:
            with self.graph.inserting_before(behind_inputs(self.graph)):
                self.inverse = InMemory(insert(self.graph, _inverse_scales, table)).insert(self.graph)
        with self.graph.inserting_before(before):
            return call(self.graph, aten.slice.Tensor, self.inverse, 0, row, row + 1)


def _inverse_scales(table: torch.Tensor, _: object) -> torch.Tensor:
    """Return ``2.0**-exponent`` for every row (rows, 1) by writing the bits of a float32."""
    return ((127 - table[:, :1]) << 23).view(torch.float32)


def _copy(graph: Graph, copy: Node, triton: bool) -> None:
    code = Transposed.of(copy).q
    with graph.inserting_before(copy):
        if triton:
            new = TransposeCodes(code).insert(graph)
        else:
            matrix = call(graph, aten.view.default, code, [-1, int(copy.meta["val"].shape[0])])
            transposed = call(graph, aten.permute.default, matrix, [1, 0])
            new = graph.call_function(aten.clone.default, (transposed,), {"memory_format": torch.contiguous_format})
    substitute(graph, copy, new)


def _native(graph: Graph, node: Node, gemm: CodedGemm, scales: _Scales) -> None:
    bias, dtype = gemm.bias, gemm.dtype
    factors = [scales.of(gemm.table, row, node) for row in (gemm.row_a, gemm.row_b)]
    fused = None if dtype == torch.float32 else bias  # cuBLASLt adds no float32 bias
    with graph.inserting_before(node):
        if fused is not None and tensor_of(fused).dtype != dtype:
            fused = call(graph, CONVERT, fused, dtype)
        new = call(graph, aten._scaled_mm.default, gemm.a, gemm.b, *factors, fused, None, dtype, gemm.fast)
        if bias is not None and fused is None:
            new = call(graph, aten.add.Tensor, new, bias)
    substitute(graph, node, new)


def _decoded(graph: Graph, node: Node, gemm: CodedGemm) -> None:
    """Decode both operands, then multiply them in float32, as without a GEMM over codes."""
    with graph.inserting_before(node):
        wide = []
        for q, row, fmt in ((gemm.a, gemm.row_a, gemm.format_a), (gemm.b, gemm.row_b, gemm.format_b)):
            wide.append(Dequantize(q, gemm.table, row, fmt, "packed", torch.float32).insert(graph))
            wide[-1].meta["val"] = tensor_of(q).to(torch.float32)
        new = call(graph, aten.mm.default, *wide)
        if gemm.bias is not None:
            new = call(graph, aten.add.Tensor, new, gemm.bias)
        if gemm.dtype != torch.float32:
            new = call(graph, CONVERT, new, gemm.dtype)
    substitute(graph, node, new)
