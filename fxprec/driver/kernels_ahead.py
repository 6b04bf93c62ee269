"""Compile the Triton kernels around GEMMs before the first step, in parallel, with the constants of their launches."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from fxprec import compat
from fxprec.ir.calls import call_of
from fxprec.kernels.coded_gemms import GemmKernel, QuantizeTranspose, kernel_called
from fxprec.numerics.formats import parse
from fxprec.passes.analysis.joint import dim_hint
from fxprec.passes.analysis.traffic.nodes import set_values
from fxprec.runtime.gemm.hardware_casts import casts_in_hardware
from fxprec.runtime.gemm.launch import Alternatives, Launch
from fxprec.runtime.gemm.ops import launches_of

log = logging.getLogger(__name__)


def failing_kernels(graph: Graph, device: torch.device) -> dict[GemmKernel, str]:
    """Compile the kernels that a lowered half launches beside Inductor's; return those that fail, with the cause.

    A GEMM fails only if none of its tile variants compiles.
    """
    called = [(node, kernel) for node in graph.nodes if (kernel := kernel_called(node)) is not None]
    launches = _launches(graph, [node for node, _ in called], device)
    distinct = list(dict.fromkeys(each for found in launches for tiles in found for each in tiles))
    log.info("compiling %d variants of kernels around GEMMs for %s", len(distinct), device)
    begun = time.perf_counter()
    causes = _compiled(distinct)
    log.info("compiled them in %.1f s", time.perf_counter() - begun)
    failing = {}
    for (_, kernel), found in zip(called, launches, strict=True):
        for tiles in found:
            whys = [causes[each] for each in tiles if each in causes]
            if len(whys) == len(tiles):
                failing[kernel] = whys[-1]
    return failing


def _compiled(launches: Sequence[Launch]) -> dict[Launch, str]:
    """Compile launches; return those that do not compile, with the cause."""
    with ThreadPoolExecutor(min(len(launches), os.cpu_count() or 1) or 1) as pool:  # ptxas and LLVM take most time
        causes = list(pool.map(Launch.why_not_compiled, launches))
    failed = [launch for launch, why in zip(launches, causes, strict=True) if why is not None]
    # Retry in one thread: in Python 3.11 and 3.12 parallel ast.parse can raise a SystemError (CPython 106905).
    return {launch: why for launch in failed if (why := launch.why_not_compiled()) is not None}


def _launches(graph: Graph, nodes: Sequence[Node], device: torch.device) -> list[list[Alternatives]]:
    """Return the launches of each node, each as alternative tile variants."""
    if any(source.meta.get("val") is None for node in nodes for source in node.all_input_nodes):
        set_values(graph)
    for node in nodes:
        if (cast := QuantizeTranspose.match(node)) is not None:
            casts_in_hardware(parse(cast.format), device, keep=cast.keep)  # tests the cast once, with real numbers

    with compat.FakeTensorMode():
        return [launches_of(type(call_of(node)), map_arg(node.args, lambda n: _like(n, device))) for node in nodes]


def _like(node: Node, device: torch.device) -> Any:
    """Return an empty tensor with a node's dtype, sizes and strides as traced, or the hint of a symbolic size."""
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return dim_hint(val)
    sizes: tuple[list[int], ...] = tuple([dim_hint(n) for n in numbers] for numbers in (val.shape, val.stride()))
    return torch.empty_strided(*sizes, dtype=val.dtype, device=device)
