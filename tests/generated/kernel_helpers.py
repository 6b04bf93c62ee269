"""What the tests of generated kernels share: graphs with symbolic ops from plain functions, lowered, run both ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own deprecations, at import
    import torch._inductor.compile_fx
    from torch._inductor.decomposition import select_decomp_table

import fxprec.runtime.reference_ops  # noqa: F401  registers implementations
from fxprec import compat
from fxprec.compat import copied
from fxprec.ir import symbolic
from fxprec.ir.symbolic import AS_STORED, QUANTIZE
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import format_row
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.rows import WatchedRows

FORMAT = "1-4-3+4"
EXPONENT = 3  # of the rows that are scaled


def scale_table(formats: Sequence[str], *, scaled: Collection[int] = (), measure: bool = False) -> torch.Tensor:
    """A row per format; gradients that come in carry no scale."""
    rows = [[EXPONENT if i in scaled else 0, *format_row(parse(f))[1:], 0, int(measure)] for i, f in enumerate(formats)]
    return torch.tensor(rows, dtype=torch.int32)


def stored(x: torch.Tensor, table: torch.Tensor, row: int = 0, fmt: str = FORMAT, storage: str = "packed"):
    """Codes of ``x``, and what is read back from them."""
    q = QUANTIZE(x, table, row, fmt, storage)
    return q, symbolic.DEQUANTIZE(q, table, AS_STORED, fmt, storage, torch.float32)


def traced(function: Callable[..., object], *inputs: torch.Tensor, dynamic: bool = False) -> GraphModule:
    """The function as a decomposed graph with fake values, as lowering gets it."""
    with torch.no_grad():
        mode = "symbolic" if dynamic else "fake"
        gm = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode=mode)(*inputs)
    (results,) = gm.graph.output_node().args
    if not isinstance(results, list | tuple):
        gm.graph.output_node().args = ((results,),)
        gm.recompile()
    return gm


def two_casts() -> GraphModule:
    """Return a graph that rounds a ReLU's result, and its product with a weight."""

    def f(x: torch.Tensor, w: torch.Tensor, table: torch.Tensor) -> object:
        return stored(stored(torch.relu(x), table)[1] @ w, table, 1)

    return traced(f, torch.randn(4, 8), torch.randn(8, 8), scale_table([FORMAT] * 2))


def lower_half(gm: GraphModule, lowering: str, without: Collection[str], device: str = "cpu") -> Lowered:
    """Lower a half whose two rows are watched."""
    rows = WatchedRows(watched=frozenset({0, 1}))
    return lower(gm, lowering, device, rows, calls=compat.TritonCalls(), without=frozenset(without))


def generated(
    gm: GraphModule, *, watched: Collection[int] = (), scaled: Collection[int] = ()
) -> tuple[GraphModule, Lowered]:
    """A lowered copy."""
    own = copied(gm)
    rows = WatchedRows(watched=frozenset(watched), scaled=frozenset(scaled))
    return own, lower(own, "triton", "cpu", rows, calls=compat.TritonCalls())


def run(gm: GraphModule, *inputs: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad(), np.errstate(all="ignore"):  # the interpreter is NumPy, which warns of inf and NaN
        return list(gm(*inputs))
