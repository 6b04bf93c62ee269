"""Keep 8-bit casts in Inductor's loops on a CPU as one operator each, whose C++ is printed from the codec.

An expansion has two dozen operators. Each of them would pass through every stage of Inductor. Inductor would also write
a decoded value to memory, since it would count as too expensive to recompute where it is read.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch.fx import Graph, Node

from fxprec import compat
from fxprec.ir.symbolic import Dequantize, Quantize, stored_dtype
from fxprec.numerics.formats import parse
from fxprec.numerics.loops import loop_function
from fxprec.passes.lowering.scales_beside import ScalesBeside


def casts_in_loops(graph: Graph, casts: Collection[Node], scaled: Collection[int]) -> frozenset[Node]:
    """Return the casts that stay in the graph as one operator, and register their lowerings with Inductor.

    If a cast's row is ``scaled``, an operator beside the cast multiplies by the scale.
    """
    lower_casts()
    scales = ScalesBeside(graph)
    ordered = [node for node in graph.nodes if node in casts]  # a set's order would name equal graphs differently
    calls = {node: Quantize.match(node) or Dequantize.of(node) for node in ordered}
    short = {node: cast for node, cast in calls.items() if parse(cast.format).bits <= 8}
    return frozenset(scales.scale(node) if cast.row in scaled else node for node, cast in short.items())


def lower_casts() -> None:
    """Register Inductor's lowerings of both casts."""
    compat.lower_pointwise(Quantize.target, _stored, _encode)
    compat.lower_pointwise(Dequantize.target, _read, _decode)


def _stored(table: object, row: int, format: str, storage: str) -> torch.dtype:
    return stored_dtype(parse(format), storage)


def _encode(x: object, dtype: torch.dtype, table: object, row: int, format: str, storage: str) -> object:
    text = partial(loop_function, "encode", parse(format))
    wide = compat.converted_in_loop(x, torch.float32, dtype)
    code = compat.call_in_loop(wide, f"encode {format}", text, torch.int32)
    byte = compat.converted_in_loop(code, torch.uint8, torch.int32)
    return compat.converted_in_loop(byte, _stored(table, row, format, storage), torch.uint8)


def _read(table: object, row: int, format: str, storage: str, dtype: torch.dtype) -> torch.dtype:
    return dtype


def _decode(
    q: object, stored: torch.dtype, table: object, row: int, format: str, storage: str, dtype: torch.dtype
) -> object:
    text = partial(loop_function, "decode", parse(format))
    byte = compat.converted_in_loop(q, torch.uint8, stored)
    code = compat.converted_in_loop(byte, torch.int32, torch.uint8)
    x = compat.call_in_loop(code, f"decode {format}", text, torch.float32)
    return compat.converted_in_loop(x, dtype, torch.float32)
