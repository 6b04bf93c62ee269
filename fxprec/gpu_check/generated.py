"""Part of item 4: kernels generated for a graph, and kernels of block formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxprec.runtime.gemm.ops
import fxprec.runtime.gemm.reference_ops
import fxprec.runtime.reference_ops  # noqa: F401  registers implementations
from fxprec import compat
from fxprec.compat import copied
from fxprec.driver.verify import checked_run
from fxprec.gpu_check.ground import Ground, require, same
from fxprec.gpu_check.samples import table_of
from fxprec.ir import symbolic
from fxprec.ir.symbolic import Dequantize, Quantize, TensorScale
from fxprec.numerics import blocks
from fxprec.passes.lowering.blocks import lower_blocks
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.rows import WatchedRows

FORMATS = ["1-4-3+4", "1-5-2"]
BLOCKS = ("mxfp6", "nvfp4", "int4", "int8/32:bf16")


def regions() -> Iterator[tuple[str, Callable[..., object], tuple[Tensor, ...]]]:
    """Yield functions with casts, and inputs on the CPU."""

    def stored(x: Tensor, table: Tensor, row: int) -> tuple[Tensor, Tensor]:
        q = symbolic.QUANTIZE(x, table, row, FORMATS[row], "packed")
        return q, symbolic.DEQUANTIZE(q, table, symbolic.AS_STORED, FORMATS[row], "packed", torch.float32)

    def elementwise(x: Tensor, w: Tensor, table: Tensor) -> object:
        q, value = stored(torch.relu(x) * 2 + x, table, 0)
        return q, *stored(value @ w, table, 1)

    def by_row(x: Tensor, w: Tensor, table: Tensor) -> object:
        q, value = stored(F.gelu(F.layer_norm(x, x.shape[-1:])), table, 0)
        return q, *stored(torch.softmax(value @ w, -1), table, 1)

    table = table_of(FORMATS, torch.device("cpu"), exponent=2)
    x, w = torch.randn(33, 48), torch.randn(48, 40)
    yield "element by element", elementwise, (x, w, table)
    yield "row by row", by_row, (x, w, table)


def check_region(ground: Ground, function: Callable[..., object], inputs: tuple[Tensor, ...]) -> None:
    """Lower a graph to generated kernels; compare them with the reference on the device, and that with the CPU's."""
    here = [x.to(ground.device) for x in inputs]
    with torch.no_grad():
        plain = make_fx(function, decomposition_table=compat.decompositions(), tracing_mode="fake")(*here)
    (results,) = plain.graph.output_node().args
    plain.graph.output_node().args = (tuple(results),)  # type: ignore[arg-type]
    plain.recompile()
    own = copied(plain)
    rows = WatchedRows(watched=frozenset({0, 1}), scaled=frozenset({0, 1}))
    lowered = lower(own, "triton", "cuda", rows, calls=compat.TritonCalls())
    require(bool(lowered.generated.kernels), "no kernel was generated")
    found, faults = checked_run(own, copied(plain), lowered, here)
    require(not faults, "; ".join(f"{fault.kernel}: {fault.reason}" for fault in faults))
    with torch.no_grad():
        wanted = plain(*here)
    for k, (mine, theirs) in enumerate(zip(found, wanted, strict=False)):
        same(f"result {k}", mine, theirs)


def check_blocks(ground: Ground, name: str) -> None:
    """Cast to a block format and back, to nearest and stochastically; compare bytes and numbers with the CPU's."""
    seed, table = torch.tensor([12345], dtype=torch.int32), table_of(FORMATS, torch.device("cpu"))
    for count, dtype in ((1100, torch.float32), (2048, torch.bfloat16), (1, torch.float32)):
        x = (torch.randn(count) * 2.0 ** torch.randint(-20, 20, (count,))).to(dtype)
        for stochastic in (False, True):
            gm = _block_graph(name, x, ground.device, stochastic=stochastic)
            wanted = gm(x, seed, table)
            lower_blocks(gm, "triton", ground.device.type, compat.TritonCalls())
            gm.recompile()
            found = gm(*(each.to(ground.device) for each in (x, seed, table)))
            for what, mine, theirs in zip(("bytes", "numbers"), found, wanted, strict=True):
                same(f"{what} of {count}{', stochastic' if stochastic else ''}", mine, theirs)


def _block_graph(name: str, like: Tensor, device: torch.device, *, stochastic: bool) -> GraphModule:
    """Return a graph that casts an input to blocks and back; its other inputs are the seed and the scale table.

    Kernels allocate their outputs on ``device``.
    """
    x = torch.empty_like(like, device=device)
    fmt, graph = blocks.find_blocks(name), Graph()
    at, seed, table = (graph.placeholder(name) for name in ("x", "seed", "table"))
    at.meta["val"], seed.meta["val"] = x, torch.zeros(1, dtype=torch.int32)
    whole = TensorScale(at, name).insert(graph) if fmt.tensor_scale else None
    stored = Quantize(at, table, 5, name, "packed", seed if stochastic else None, whole).insert(graph)
    read = Dequantize(stored, table, 5, name, "packed", x.dtype, x.numel(), whole).insert(graph)
    if whole is not None:
        whole.meta["val"] = x.new_empty(1)
    stored.meta["val"] = x.new_empty(-(-x.numel() // fmt.block), fmt.head_bytes + fmt.code_bytes, dtype=torch.uint8)
    read.meta["val"] = x.new_empty(x.numel(), dtype=x.dtype)
    graph.output((stored, read))
    return GraphModule(torch.nn.Module(), graph)
