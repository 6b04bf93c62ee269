"""Block formats outside of the CPU's kernels: Triton's, bit for bit and as machine code, and what Inductor fuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_samples import numbers
from interpreted import interpreted
from torch.fx import Graph, GraphModule

pytest.importorskip("triton")

import fxprec.runtime.reference_ops  # noqa: F401  registers implementations
from fxprec import compat
from fxprec.ir.symbolic import TABLE_COLUMNS, Dequantize, Quantize, TensorScale
from fxprec.numerics import ahead, block_device, blocks
from fxprec.passes.lowering.blocks import lower_blocks

NAMES = ("mxfp6", "nvfp4", "int4", "int8/32:bf16", "int1/1024:bf16")


def graph_of(name: str, x: torch.Tensor, dtype: torch.dtype, *, stochastic: bool) -> GraphModule:
    """A cast to blocks of ``x`` (an input, as are the seed and the table) and back."""
    fmt, graph = blocks.find_blocks(name), Graph()
    at, seed, table = (graph.placeholder(name) for name in ("x", "seed", "table"))
    at.meta["val"], seed.meta["val"] = x, torch.zeros(1, dtype=torch.int32)
    whole = TensorScale(at, name).insert(graph) if fmt.tensor_scale else None
    stored = Quantize(at, table, 5, name, "packed", seed if stochastic else None, whole).insert(graph)
    read = Dequantize(stored, table, 5, name, "packed", dtype, x.numel(), whole).insert(graph)
    if whole is not None:
        whole.meta["val"] = x.new_empty(1)
    stored.meta["val"] = x.new_empty(-(-x.numel() // fmt.block), fmt.head_bytes + fmt.code_bytes, dtype=torch.uint8)
    read.meta["val"] = x.new_empty(x.numel(), dtype=dtype)
    graph.output((stored, read))
    return GraphModule(torch.nn.Module(), graph)


def check(name: str, lowering: str, device_type: str) -> None:
    """Assert that a lowered cast gives the reference's bytes and numbers."""
    seed, table = torch.tensor([12345], dtype=torch.int32), torch.zeros(6, TABLE_COLUMNS, dtype=torch.int32)
    for kind, count, dtype in (
        ("wide", 1100, torch.float32),
        ("mean", 1, torch.bfloat16),
        ("sparse", 2048, torch.bfloat16),
    ):
        x = numbers(kind, count).to(torch.float32 if count == 1 else dtype)
        for stochastic in (False, True):
            gm = graph_of(name, x, dtype, stochastic=stochastic)
            wanted = gm(x, seed, table)
            lower_blocks(gm, lowering, device_type, compat.TritonCalls())
            gm.recompile()
            assert "fxprec" not in gm.code
            with np.errstate(all="ignore"):
                found = gm(x, seed, table)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (kind, stochastic)


@pytest.mark.parametrize("name", NAMES)
def test_what_inductor_fuses_gives_the_references_bits(name: str) -> None:
    check(name, "inductor", "cuda")


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_triton_kernels_give_the_references_bits(name: str) -> None:
    check(name, "triton", "cpu")


@pytest.mark.parametrize("arch", [80, 90, *(pytest.param(arch, marks=pytest.mark.full) for arch in (89, 100))])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_kernels_compile_without_spilling(arch: int) -> None:
    fmt = blocks.NVFP4 if arch in (80, 100) else blocks.INT4
    for kernel in (block_device.store_kernel(fmt, stochastic=True), block_device.load_kernel(fmt)):
        made = ahead.compile_generated(kernel.source, kernel.name, kernel.parameters("bf16"), block_device.WARPS, arch)
        assert ahead.resources(made, arch).excess is None, kernel.name
