"""Generated kernels compile to machine code for GPUs that are not here, without spilling."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from generated.kernel_helpers import generated, scale_table, stored, traced

from benchmarks.triton_table import compile_for
from fxprec.ir.symbolic import QUANTIZE
from fxprec.numerics import ahead
from fxprec.numerics.ahead import Resources
from fxprec.runtime.gemm import kernels as gemm_kernels

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def fused_norm(x, residual, weight, table):
    """A residual add, RMS norm over 4096 columns, two casts with statistics."""
    x = x + stored(residual, table)[1]
    norm = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight
    return x, QUANTIZE(norm, table, 1, "1-4-3+4", "packed")


def gradient(g, q, table):
    """GELU's backward, then a cast of a gradient to e5m2 with a scale; bfloat16 in."""
    x = stored(q.float(), table)[1]
    inner = torch.tanh(0.79788456 * (x + 0.044715 * x * x * x))
    return QUANTIZE(g.float() * (0.5 * (1 + inner)), table, 1, "e5m2", "native")


def kernels() -> list[tuple[dict, str]]:
    wide, table = torch.zeros(2, 64, 4096), scale_table(["1-4-3+4", "e5m2"], scaled=[1])
    found = []
    for function, inputs in ((fused_norm, (*wide, wide[0, 0])), (gradient, wide.bfloat16())):
        _, lowered = generated(traced(function, *inputs, table), watched=[0, 1], scaled=[1])
        (kernel,) = lowered.generated.kernels
        found.append((kernel.to_dict(), kernel.source))
    return found


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_without_spilling(arch: int) -> None:
    """sm_80 has no 8-bit float types: codes travel as integers."""
    for kernel, source in kernels():
        found = compile_for(kernel, source, arch)
        assert found.excess is None, kernel["name"]
        assert 8 <= found.registers <= 160, kernel["name"]


def at_launch(signature: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the signatures that launches can make of one: each integer alone equal to 1, then none divisible by 16."""
    plain = {name: kind.partition(":")[0] for name, kind in signature.items()}
    integers = [name for name, kind in plain.items() if not kind.startswith("*")]
    yield from ({**signature, name: f"{plain[name]}:1"} for name in integers)
    yield {**signature, **{name: plain[name] for name in integers}}


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_kernels_compile_for_each_size_that_a_launch_tells_apart(arch: int) -> None:
    """Triton's launcher makes a constant of an integer equal to 1, which has no method of a tensor."""
    every = slice(None) if arch == 90 else slice(1)  # the first integer alone: rows, or a slot of the table
    kernel, source = kernels()[0]
    assert "i32" in dict(kernel["parameters"]).values()
    for signature in [*at_launch(dict(kernel["parameters"]))][every]:
        ahead.compile_generated(source, kernel["name"], list(signature.items()), 4, arch)
    for case in gemm_kernels.cases(arch, quick=True):
        for signature in [*at_launch(case.signature)][every]:
            replace(case, signature=signature).compile(arch)


def test_launches_tell_sizes_apart() -> None:
    found = list(at_launch({"x": "*fp32:16", "m": "i32:16", "n": "i32"}))
    assert found == [
        {"x": "*fp32:16", "m": "i32:1", "n": "i32"},
        {"x": "*fp32:16", "m": "i32:16", "n": "i32:1"},
        {"x": "*fp32:16", "m": "i32", "n": "i32"},
    ]


def test_too_much_is_an_excess() -> None:
    assert Resources(90, 255, 16, 0).excess == "spills 16 bytes"
    assert Resources(90, 32, 0, 100 << 10).excess is None
    assert Resources(89, 32, 0, 100 << 10).excess == "needs 102400 bytes of shared memory"


def test_a_kernel_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which is asked for its compute capability only."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    (kernel, source), *_ = kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameters = [(n, k) for n, k in kernel["parameters"]]
        assert ahead.why_not_generated(source, kernel["name"], parameters, 4) is None
        broken = source.replace("tl.minimum(", "tl.no_such_function(")
        why = ahead.why_not_generated(broken, kernel["name"], parameters, 4)
    assert why is not None
    assert why.startswith("it does not compile: CompilationError")


@pytest.mark.parametrize("arch", [80, 90])
def test_products_are_rounded_before_they_are_added(arch: int) -> None:
    """Compiled as Inductor does, with contraction allowed: the machine code multiplies and adds, and has no FFMA."""
    table = scale_table(["1-4-3+4"], scaled=[0])

    def affine(x, w, b, table):
        return QUANTIZE(torch.add(x * w, b * b, alpha=3) - x**2, table, 0, "1-4-3+4", "packed")

    inputs = [torch.zeros(64, 256) for _ in range(3)]
    _, lowered = generated(traced(affine, *inputs, table), scaled=[0])
    (kernel,) = lowered.generated.kernels
    compiled = ahead.compile_generated(kernel.source, kernel.name, kernel.parameters, kernel.num_warps, arch)
    text = ahead.disassembled(compiled, "-sass")
    assert "FMUL" in text
    assert "FADD" in text
    assert "FFMA" not in text
