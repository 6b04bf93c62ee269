"""Multiply stored codes where that pays: ``gemm(dequantize(a), dequantize(b))`` becomes ``fxprec::gemm(a, b)``.

Scales are powers of two in the table, so taking them off costs nothing. Where a native GEMM in backward reads a forward
tensor along its rows, forward makes a transposed copy beside the first copy. Backward's other readers then read the
transposed copy too, so that only one copy is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import QUANTIZE, TRANSPOSED, CodedGemm, Dequantize, KeepCodes, KeepNonfinite, Transposed
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.coded_gemms import PURE_VIEWS, Coded, Layout
from fxprec.passes.analysis.joint import input_at, is_backward, readers, tensor_of
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import emit, emit_call, emit_on, replace_node
from fxprec.passes.weigh_gemms import Found, gemm_nodes, kernel_of

aten = torch.ops.aten
_NATIVE: tuple[Layout, Layout] = ("rows", "columns")  # the layouts that torch._scaled_mm takes


@dataclass(frozen=True)
class LowGemms(Pass):
    """Rewrite the GEMMs for which ``work.answers`` says that multiplying codes pays."""

    name: str = "low-gemms"

    def apply(self, work: Work) -> None:
        gpu = gemm_costs.gpu_of(work.joint.device)
        if gpu is None:
            return
        rewrite = _Rewrite(work.joint.graph, gpu.has_fp8, work.settings.asked.fast_accum)
        for op, answer in zip(work.grouped.gemms, work.answers, strict=True):
            for node in gemm_nodes(op) if answer.pays else ():
                found = kernel_of(node, gpu)
                if isinstance(found, Found):  # for the others the answer's ``why`` has the reason
                    rewrite.gemm(node, found)
        rewrite.read_copies()


class _Rewrite:
    def __init__(self, graph: Graph, has_fp8: bool, fast: bool | None) -> None:
        self.graph, self.has_fp8, self.fast = graph, has_fp8, fast
        self.codes: dict[tuple[Node, Node | None], Node] = {}
        self.copies: dict[Node, Node] = {}  # codes -> their transposed copy

    def gemm(self, node: Node, kernels: Found) -> None:
        a, b = kernels.a, kernels.b
        bias = input_at(node, 0) if node.target is aten.addmm.default else None
        out = tensor_of(node)
        native, backward = kernels.kernel == "native", is_backward(node)
        factors = [
            self.copy(code) if native and x.layout != layout else code
            for code, x, layout in zip((self.code(a), self.code(b)), (a, b), _NATIVE, strict=True)
        ]
        with self.graph.inserting_before(node):
            left, right = (self.seen(c, x, backward) for c, x in zip(factors, (a, b), strict=True))
            rows, formats = (a.row, b.row), (a.fmt.name, b.fmt.name)
            fast = not backward if self.fast is None else self.fast
            gemm = CodedGemm(left, right, bias, a.table, *rows, *formats, out.dtype, kernels.kernel, fast)
            new = emit_call(self.graph, gemm, node, val=out)
        replace_node(node, new)

    def code(self, x: Coded) -> Node:
        """Return the codes to multiply; inf and NaN of a guarded gradient are put into its codes."""
        code = self.codes.get((x.q, x.source))
        if code is None:
            code = self.codes[x.q, x.source] = self._code(x)
        return code

    def _code(self, x: Coded) -> Node:
        code = x.q
        stored = tensor_of(code)
        with self.graph.inserting_before(code.next):
            is_native = x.fmt.torch_dtype is None or stored.dtype == x.fmt.torch_dtype or x.fmt.bits > 8
            if not is_native and (self.has_fp8 or x.source is not None):
                code = emit(self.graph, aten.view.dtype, (code, x.fmt.torch_dtype), x.q)
            if x.source is not None:
                is_float = tensor_of(code).dtype.is_floating_point
                kept = KeepNonfinite(code, x.source) if is_float else KeepCodes(code, x.source, x.fmt.name)
                code = emit_call(self.graph, kept, x.q)
        return code

    def seen(self, code: Node, x: Coded, backward: bool) -> Node:
        """Return codes, or their transposed copy, viewed as the matrix that the GEMM multiplies."""
        val = tensor_of(code)
        if val.ndim != 2:
            code = emit(self.graph, aten.view.default, (code, [-1, int(val.shape[-1])]), code, backward=backward)
        is_copy = code.target is TRANSPOSED
        if is_copy == (x.layout == "columns"):
            return code
        return emit(self.graph, aten.permute.default, (code, [1, 0]), code, backward=backward)

    def copy(self, code: Node) -> Node:
        """Return the transposed copy of codes. It is made once, directly behind the codes."""
        if code not in self.copies:
            with self.graph.inserting_before(code.next):
                self.copies[code] = emit_call(self.graph, Transposed(code), code)
        return self.copies[code]

    def read_copies(self) -> None:
        """Let backward's other readers of a forward tensor read its transposed copy, which is saved anyway."""
        for code, copy in self.copies.items():
            q = code if code.target is QUANTIZE else input_at(code, 0)
            if is_backward(q):
                continue
            for decode in Dequantize.nodes_among(q.users):
                found = [pair for pair in readers(decode, _shows_in_forward) if is_backward(pair[1])]
                x = self._decoded(copy, decode, [reader for _, reader in found]) if found else None
                if x is not None:
                    for shown, reader in found:
                        with self.graph.inserting_before(reader):
                            reader.replace_input_with(shown, self._as_shown(shown, decode, x))

    def _decoded(self, copy: Node, decode: Node, readers: list[Node]) -> Node | None:
        """Decode the copy in front of its readers; None if its shape is dynamic and not 2-dim: then both are saved."""
        read = Dequantize.of(decode)
        q, stored = read.q, tensor_of(read.q)
        if stored.ndim != 2 and not all(isinstance(size, int) for size in stored.shape):
            return None
        with self.graph.inserting_before(min(readers)):
            x = emit(self.graph, aten.permute.default, (copy, [1, 0]), q, backward=True)
            if stored.dtype != x.meta["val"].dtype:
                x = emit(self.graph, aten.view.dtype, (x, stored.dtype), q, backward=True)
            x = emit_call(self.graph, replace(read, q=x), q, backward=True)
            x = self._contiguous(x, q)
            if stored.ndim != 2:
                x = emit(self.graph, aten.view.default, (x, [int(s) for s in stored.shape]), q, backward=True)
        return x

    def _as_shown(self, shown: Node, decode: Node, x: Node) -> Node:
        """Apply the views between ``decode`` and ``shown`` to ``x``."""
        if shown is decode:
            return x
        (source,) = shown.all_input_nodes[:1]
        return emit_on(self.graph, shown, self._as_shown(source, decode, x), backward=True)

    def _contiguous(self, x: Node, like: Node) -> Node:
        val: torch.Tensor = x.meta["val"]
        options = {"memory_format": torch.contiguous_format}
        return emit(self.graph, aten.clone.default, (x,), like, kwargs=options, backward=True, val=val.contiguous())


def _shows_in_forward(node: Node) -> bool:
    return not is_backward(node) and node.target in PURE_VIEWS
