"""Casts beside GEMMs that a kernel does on the way: codes with their transpose, and a product stored as codes."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.ir import symbolic
from fxprec.ir import symbolic_gemms as gemms
from fxprec.numerics.stats import SITE_COUNTERS
from fxprec.passes.analysis import ops
from fxprec.passes.lowering.stats import Counters

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_HALVES = (torch.bfloat16, torch.float16)
# What is in memory before its quantize, beside inputs: results of library calls and of other kernels of ours.
_MATERIAL = ops.GEMMS | ops.GEMMS_BACKWARD | {gemms.GEMM, gemms.MATMUL_CODES, aten._scaled_mm.default}


def call(graph: Graph, target: Any, *args: Any) -> Node:
    """Append a call at the insertion point."""
    return graph.call_function(target, args)


def find(graph: Graph, target: Any) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def replace(graph: Graph, node: Node, new: Node) -> None:
    new.meta.setdefault("val", node.meta.get("val"))
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def copy_with_codes(graph: Graph, copy: Node, counters: Counters, without: Collection[str]) -> bool:
    """Make codes and their transpose in one kernel, where what is rounded is in memory anyway; say whether.

    Elsewhere the codes come out of the kernel that computes the values, and one byte an element is read back.
    """
    code = copy.args[0]
    assert isinstance(code, Node)
    keep = code.target is symbolic.KEEP_NONFINITE
    q: Any = code.args[0] if keep else code
    while q.target is aten.view.dtype:
        q = q.args[0]
    if q.target is not symbolic.QUANTIZE:
        return False
    x, table, row, fmt, storage = q.args
    source = x.args[0] if _is_widened(x) else x
    if not _is_material(source) or gemms.GemmKernel("quantize+transpose", (fmt,)).name in without:
        return False
    with graph.inserting_before(q):
        both = call(graph, gemms.QUANTIZE_TRANSPOSE, source, table, row, fmt, storage, keep)
        codes, turned, counted = (call(graph, operator.getitem, both, i) for i in range(3))
    codes.meta["val"], turned.meta["val"] = q.meta["val"], copy.meta["val"].to(q.meta["val"].dtype)
    counted.meta["val"] = _counters(q)
    counters.add(row, counted)
    _put(graph, copy, turned)
    if code is not q:
        _put(graph, code, codes)
    if not keep or _is_guarded(q):
        replace(graph, q, codes)
    return True


def _counters(q: Node) -> torch.Tensor:
    return q.meta["val"].new_empty(SITE_COUNTERS, dtype=torch.int32)  # type: ignore[no-any-return]


def _put(graph: Graph, old: Node, new: Node) -> None:
    """Put ``new`` in the place of ``old``, in its dtype."""
    if old.meta["val"].dtype != new.meta["val"].dtype:
        with graph.inserting_before(old):
            new = call(graph, aten.view.dtype, new, old.meta["val"].dtype)
    replace(graph, old, new)


def _is_guarded(q: Node) -> bool:
    """Say whether all that is decoded of ``q`` gets its inf and NaN back, which codes that kept them do not change."""
    readers = [u for u in q.users if u.target is symbolic.DEQUANTIZE]
    return len(readers) == len(q.users) and all(g.target is symbolic.KEEP_NONFINITE for r in readers for g in r.users)


def codes_of_product(graph: Graph, node: Node, counters: Counters, without: Collection[str]) -> bool:
    """Let a generated GEMM store its product as codes and count, where nothing else reads it; say whether.

    It measures no moments: they would spill the large tiles' registers.
    """
    users = _readers(node)
    if len(users) != 1 or users[0].target is not symbolic.QUANTIZE or users[0].args[4] == "simulate":
        return False
    (q,) = users
    _, _, row, fmt, storage = q.args
    assert isinstance(row, int)
    if counters.wants_moments(row) or gemms.GemmKernel("gemm", (*node.args[6:8], fmt)).name in without:  # type: ignore[arg-type]
        return False
    with graph.inserting_before(node):
        both = call(graph, gemms.MATMUL_TO_CODES, *node.args[:-1], row, fmt, storage, False, counters.wants(row))
        codes, counted = (call(graph, operator.getitem, both, i) for i in range(2))
    counted.meta["val"] = _counters(q)
    counters.add(row, counted)
    replace(graph, q, codes)
    return True


def _readers(node: Node) -> list[Node]:
    """Return what reads a product, seen through its widening to float32."""
    users: list[Node] = []
    for user in node.users:
        users += list(user.users) if _is_widened(user) else [user]
    return users


def _is_widened(x: Node) -> bool:
    if x.target is not _CONVERT or x.args[1] != torch.float32:
        return False
    source = x.args[0]
    assert isinstance(source, Node)
    val = source.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype in _HALVES


def _is_material(x: Node) -> bool:
    while x.target in ops.VIEWS and x.all_input_nodes:
        x = x.all_input_nodes[0]
    return x.op == "placeholder" or x.target in _MATERIAL
