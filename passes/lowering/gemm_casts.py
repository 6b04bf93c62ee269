"""Merge casts beside GEMMs into kernels: codes with their transpose, and a product that is stored as codes."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.ir.symbolic import GEMM, CodedGemm, Dequantize, KeepCodes, KeepNonfinite, Quantize, Transposed
from fxprec.kernels.coded_gemms import MATMUL_CODES, GemmKernel, MatmulToCodes, QuantizeTranspose
from fxprec.numerics.stats import SITE_COUNTERS
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.coded_gemms import PURE_VIEWS
from fxprec.passes.analysis.joint import argument, input_at, is_view, shown, tensor_of, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.lowering.stats import Counters
from fxprec.passes.sites import replace_node

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
# Nodes whose result is in memory before its quantize, beside inputs: library calls and fxprec's other kernels.
_MATERIAL = ops.GEMMS | ops.GEMMS_BACKWARD | {GEMM, MATMUL_CODES, aten._scaled_mm.default}


def call(graph: Graph, target: Any, *args: Any) -> Node:
    """Append a call at the insertion point."""
    return graph.call_function(target, args)


def substitute(graph: Graph, node: Node, new: Node) -> None:
    """Replace a node by ``new``, which takes over the node's fake value."""
    new.meta.setdefault("val", node.meta.get("val"))
    replace_node(node, new)


def copy_with_codes(graph: Graph, copy: Node, counters: Counters, without: Collection[str]) -> bool:
    """Compute codes and their transpose in one kernel if the tensor to round is in memory; return whether it was done.

    Otherwise the kernel that computes the values also writes the codes, which are read again: one byte per element.
    """
    code = Transposed.of(copy).q
    chain = [copy, code]
    kept = KeepNonfinite.match(code) or KeepCodes.match(code)
    q = code if kept is None else kept.rounded
    while q.target is aten.view.dtype:
        q = input_at(q, 0)
        chain.append(q)
    chain.append(q)
    cast = Quantize.match(q)
    if cast is None:
        return False
    source = _before_widening(graph, cast.x, q)
    if not _is_material(source) or GemmKernel("quantize+transpose", (cast.format,)).name in without:
        return False
    row_major = any(user not in chain for node in chain[1:] for user in node.users)
    wanted = {"keep": kept is not None, "row_major": row_major, "stats": counters.wants(cast.row)}
    with graph.inserting_before(q):
        both = QuantizeTranspose.like(cast, x=source, **wanted).insert(graph)
        codes, transposed, counted = (call(graph, operator.getitem, both, i) for i in range(3))
    codes.meta["val"], transposed.meta["val"] = q.meta["val"], copy.meta["val"].to(q.meta["val"].dtype)
    counted.meta["val"] = _counters(q)
    counters.add(cast.row, counted)
    _put(graph, copy, transposed)
    if code is not q:
        _put(graph, code, codes)
    if kept is None or _is_guarded(q):
        substitute(graph, q, codes)
    return True


def _counters(q: Node) -> torch.Tensor:
    return tensor_of(q).new_empty(SITE_COUNTERS, dtype=torch.int32)


def _put(graph: Graph, old: Node, new: Node) -> None:
    """Replace ``old`` by ``new``, viewed in the dtype of ``old``."""
    if old.meta["val"].dtype != new.meta["val"].dtype:
        with graph.inserting_before(old):
            new = call(graph, aten.view.dtype, new, old.meta["val"].dtype)
    substitute(graph, old, new)


def _is_guarded(q: Node) -> bool:
    """Return whether every reader that decodes ``q`` gets its inf and NaN back; codes that keep them change nothing."""
    readers = Dequantize.nodes_among(q.users)
    return len(readers) == len(q.users) and all(KeepNonfinite.match(guard) for x in readers for guard in x.users)


def codes_of_product(graph: Graph, node: Node, counters: Counters, without: Collection[str]) -> bool:
    """Let a generated GEMM store its product as codes and count, if only a cast reads it; return whether it was done.

    The GEMM measures no moments, which would spill the registers of large tiles.
    """
    users = _readers(node)
    cast = Quantize.match(users[0]) if len(users) == 1 else None
    if cast is None or cast.is_simulated:
        return False
    (q,) = users
    gemm = CodedGemm.of(node)
    row, fmt = cast.row, cast.format
    if counters.wants_moments(row) or GemmKernel("gemm", (*gemm.formats, fmt)).name in without:
        return False
    with graph.inserting_before(node):
        described = {"row": row, "format": fmt, "storage": cast.storage}
        both = MatmulToCodes.like(gemm, **described, keep=False, stats=counters.wants(row)).insert(graph)
        codes, counted = (call(graph, operator.getitem, both, i) for i in range(2))
    counted.meta["val"] = _counters(q)
    counters.add(row, counted)
    substitute(graph, q, codes)
    return True


def _readers(node: Node) -> list[Node]:
    """Return the readers of a product, or of its conversion to float32."""
    users: list[Node] = []
    for user in node.users:
        users += list(user.users) if _is_widened(user) else [user]
    return users


def _is_widened(x: Node) -> bool:
    if x.target is not CONVERT or argument(x, 1) != torch.float32:
        return False
    val = value(input_at(x, 0))
    return val is not None and val.dtype in _HALVES


def _before_widening(graph: Graph, x: Node, q: Node) -> Node:
    """Return the 16-bit value that ``x`` widens, with the same views; if there is none, ``x``."""
    source, views = shown(x, lambda node: node.target in PURE_VIEWS)
    if not _is_widened(source):
        return x
    source = input_at(source, 0)
    with graph.inserting_before(q):
        for view in reversed(views):
            source = call(graph, view.target, source, *view.args[1:])
            source.meta["val"] = tensor_of(view).to(tensor_of(input_at(source, 0)).dtype)
    return source


def _is_material(x: Node) -> bool:
    while is_view(x) or x.target is operator.getitem:
        x = x.all_input_nodes[0]
    return x.op == "placeholder" or x.target in _MATERIAL
