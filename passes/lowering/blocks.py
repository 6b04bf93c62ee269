"""Lower casts to block formats: to compiled or generated kernels, or to operators that Inductor fuses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec import compat
from fxprec.ir.symbolic import CorrectScales, Dequantize, Quantize, Rotate, TensorScale, is_in_blocks
from fxprec.kernels.casts import LoadBlocks, StoreBlocks
from fxprec.numerics import block_codec, block_device, eden, hadamard
from fxprec.numerics.blocks import BlockFormat, find_blocks
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.analysis.marks import mark, marks
from fxprec.passes.lowering.expand import copied_in
from fxprec.passes.lowering.triton.launch import KernelCalls, insert_launch
from fxprec.passes.sites import replace_node

aten = torch.ops.aten


@dataclass(frozen=True)
class BlockCall:
    """One call of a generated kernel that encodes or decodes blocks."""

    kernel: str
    stores: bool
    row: int
    format: str

    @classmethod
    def of(cls, node: Node) -> BlockCall | None:
        """Return the cast that the node computes; None for nodes that call other kernels."""
        return marks(node).block_call


def lower_blocks(
    gm: GraphModule, lowering: str, device_type: str, calls: KernelCalls, without: Collection[str] = ()
) -> None:
    """Replace casts to block formats: by Triton kernels, by CPU kernels, or on a GPU by operators for Inductor.

    ``without`` names generated kernels that must not be used.
    """
    graph = gm.graph
    for node, turn in Rotate.among(Rotate.nodes(graph)):
        _expand(node, partial(hadamard.rotated, size=turn.size), turn.x, turn.seed)
    # Inductor takes a minute to generate C++ for this, so a CPU runs the reference.
    corrections = () if device_type == "cpu" else CorrectScales.among(CorrectScales.nodes(graph))
    for node, scales in corrections:
        fixed = partial(eden.corrected, row=scales.row, format=scales.format, size=scales.size)
        _expand(node, fixed, scales.q, scales.x, scales.whole, scales.seed)
    for node, scale in TensorScale.among(TensorScale.nodes(graph)):
        _expand(node, partial(block_codec.tensor_scale, fmt=find_blocks(scale.format)), scale.x)
    for q, cast in Quantize.among(filter(is_in_blocks, Quantize.nodes(graph))):
        if lowering == "triton" and _store_kernel(cast).name not in without:
            _launch_store(graph, q, cast, calls)
        elif device_type == "cpu":
            _replace(q, StoreBlocks.like(cast))
        else:
            stored = partial(block_codec.stored, row=cast.row, format=cast.format)
            _expand(q, stored, cast.x, cast.seed, cast.whole)
    for x, read in Dequantize.among(filter(is_in_blocks, Dequantize.nodes(graph))):
        if lowering == "triton" and block_device.load_kernel(find_blocks(read.format)).name not in without:
            _launch_load(graph, x, read, calls)
        elif device_type == "cpu":
            _replace(x, LoadBlocks.like(read))
        else:
            loaded = partial(block_codec.loaded, row=read.row, format=read.format)
            _expand(x, partial(loaded, elements=read.elements, dtype=read.dtype), read.q, read.whole)


def _replace(node: Node, call: StoreBlocks | LoadBlocks) -> None:
    with node.graph.inserting_before(node):
        _put(node, call.insert(node.graph))


def _put(node: Node, new: Node) -> None:
    new.meta = dict(node.meta)
    replace_node(node, new)


# Operators that Inductor fuses.


def _expand(node: Node, function: Callable[..., object], *tensors: Node | None) -> None:
    with node.graph.inserting_before(node):
        _put(node, traced_in(node.graph, function, *tensors))


def traced_in(graph: Graph, function: Callable[..., object], *tensors: Node | None) -> Any:
    """Trace a function of ``tensors``, whose shapes are known, copy it into the graph, and return its results."""
    inputs = [n for n in tensors if n is not None]
    vals = [tensor_of(n) for n in inputs]
    with compat.FakeTensorMode():
        examples = [torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cpu") for val in vals]

    def traced(*given: Tensor) -> object:
        left = iter(given)
        return function(*(None if n is None else next(left) for n in tensors))

    template = make_fx(traced, decomposition_table=compat.decompositions(), tracing_mode="fake")(*examples)
    return copied_in(graph, template, tuple(inputs), vals[0].device)


# Generated kernels.


def _launch_store(graph: Graph, q: Node, cast: Quantize, calls: KernelCalls) -> None:
    fmt, kernel = find_blocks(cast.format), _store_kernel(cast)
    with graph.inserting_before(q):
        x = _contiguous(graph, cast.x)
        salt = block_codec.salt_of(cast.row)
        arguments: dict[str, object] = {"x": x, "seed": cast.seed, "whole": cast.whole, "salt": salt}
        described = BlockCall(kernel.name, True, cast.row, cast.format)
        _put(q, _launch(graph, q, kernel, arguments, tensor_of(x).numel(), fmt, calls, described))


def _store_kernel(cast: Quantize) -> block_device.BlockKernel:
    return block_device.store_kernel(find_blocks(cast.format), stochastic=cast.seed is not None)


def _launch_load(graph: Graph, x: Node, read: Dequantize, calls: KernelCalls) -> None:
    fmt = find_blocks(read.format)
    with graph.inserting_before(x):
        arguments: dict[str, object] = {"q": read.q, "whole": read.whole}
        kernel = block_device.load_kernel(fmt)
        described = BlockCall(kernel.name, False, read.row, read.format)
        _put(x, _launch(graph, x, kernel, arguments, tensor_of(x).numel(), fmt, calls, described))


def _launch(
    graph: Graph,
    node: Node,
    kernel: block_device.BlockKernel,
    arguments: dict[str, object],
    elements: int,
    fmt: BlockFormat,
    calls: KernelCalls,
    described: BlockCall,
) -> Node:
    val = tensor_of(node)
    options: dict[str, Any] = {"dtype": val.dtype, "device": val.device}
    out = graph.call_function(aten.empty_strided.default, (list(val.shape), list(val.stride())), options)
    out.meta["val"] = val
    given = arguments | {"out": out, "n": elements}
    programs = -(-elements // (fmt.block * kernel.per_program))
    named = {name: given[name] for name in (*kernel.pointers, *kernel.integers)}
    call = insert_launch(graph, calls, kernel.source, kernel.name, programs, named, ["out"])
    mark(call, block_call=described)
    return graph.call_function(operator.getitem, (call, "out"))


def _contiguous(graph: Graph, x: Node) -> Node:
    """Return ``x`` contiguous."""
    val = tensor_of(x)
    if val.is_contiguous():
        return x
    copy = graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = val.contiguous()
    return copy
