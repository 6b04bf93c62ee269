"""Remove conversions between dtypes that cost a pass over memory and are not needed."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from fxprec.kernels.coded_gemms import TransposeCodes
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import argument, input_at, tensor_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.sites import replace_node

aten = torch.ops.aten


def share_conversions(graph: Graph) -> None:
    """Convert a value to a dtype once, so that forward's GEMM multiplies the copy that is saved for backward.

    The graph must have no symbolic operators left.
    """
    made: dict[tuple[object, ...], Node] = {}
    for node in graph.find_nodes(op="call_function", target=CONVERT):
        first = made.setdefault(node.args, node)
        if first is not node:
            replace_node(node, first)


def show_bytes_in_memory(gm: GraphModule) -> None:
    """Transpose codes as bytes, and view them as floats only afterwards, when the bytes are in memory.

    Inductor copies bytes that are not in memory yet, once for each GEMM or kernel that reads them in another dtype.
    """
    for copy, transposed in TransposeCodes.among(TransposeCodes.nodes(gm.graph)):
        shown = transposed.q
        while shown.target in ops.ALIASES:
            shown = input_at(shown, 0)
        if shown.target is aten.view.dtype:
            _transpose_bytes(gm.graph, copy, transposed.q, shown)
    gm.graph.eliminate_dead_code(lambda node: node.is_impure())
    gm.recompile()


def _transpose_bytes(graph: Graph, copy: Node, codes: Node, shown: Node) -> None:
    dtype = shown.args[1]
    with graph.inserting_before(copy):
        transposed = TransposeCodes(input_at(shown, 0)).insert(graph)
        floats = [graph.call_function(aten.view.dtype, (x, dtype)) for x in (transposed, input_at(shown, 0))]
    for old, new in zip((copy, codes), floats, strict=True):
        users = [user for user in old.users if new < user]
        for user in users:
            user.replace_input_with(old, new)


def widen_products(gm: GraphModule) -> None:
    """Let a GEMM on a GPU write float32 if its 16-bit result would only be widened and returned: a weight gradient.

    The GEMM's sums are float32 anyway. This saves a pass over memory and a rounding.
    """
    for wide in gm.graph.find_nodes(op="call_function", target=CONVERT):
        product = input_at(wide, 0)
        if argument(wide, 1) == torch.float32 and len(product.users) == 1 and all(u.op == "output" for u in wide.users):
            _widen(product, wide)
    gm.recompile()


def _widen(product: Node, wide: Node) -> None:
    if product.target is aten._scaled_mm.default and argument(product, _BIAS) is None:  # no bias to float32
        product.update_arg(_OUT_DTYPE, torch.float32)
    elif product.target is aten.mm.default and _WIDE_MM is not None and tensor_of(product).dtype != torch.float32:
        product.target = _WIDE_MM
        product.args = (*product.args, torch.float32)
    else:
        return
    product.meta["val"] = wide.meta["val"]
    replace_node(wide, product)


_BIAS, _OUT_DTYPE = 4, 6  # positions among the arguments of aten._scaled_mm
_WIDE_MM = getattr(aten.mm, "dtype", None)  # exists for CUDA only
