"""Inductor's kernels of a step in fp8, and generated ones, spill no registers on any architecture."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed

from benchmarks.gpu import spills
from benchmarks.gpu.roofline.sides import NETWORKS, SIDES
from fxprec.numerics import ahead

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
REST = [(arch, side) for arch in ahead.ARCHITECTURES for side in spills.OURS if (arch, side) != (90, "fp8 1 high")]


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("arch", "name"), [(90, "fp8 1 high"), *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_no_kernel_of_a_step_spills(arch: int, name: str) -> None:
    """With fp8's GEMMs wherever the architecture has them, so that gradients are counted, scaled and encoded."""
    side = SIDES[name]
    assert side.options is not None
    side = replace(side, options={**side.options, "gemms": "low"} if arch >= 89 else side.options)
    found = dict(spills.used(side, NETWORKS["small"], arch))
    assert len(found) > 15
    assert {kernel: used.excess for kernel, used in found.items() if not used.fits} == {}
    assert all(used.registers > 0 for used in found.values())


@pytest.mark.parametrize(("stack", "declared", "spilled"), [(0, "", 0), (8, "[1]", 0), (24, "[1]", 16), (40, "", 40)])
def test_a_stack_that_triton_declares_is_no_spill(
    monkeypatch: pytest.MonkeyPatch, stack: int, declared: str, spilled: int
) -> None:
    report = f"Function k:\n REG:32 STACK:{stack} SHARED:0 LOCAL:0"
    monkeypatch.setattr(ahead, "disassembled", lambda compiled, option: report)
    ptx = f".local .align 1 .b8 __local_depot0{declared};" if declared else ""
    compiled = SimpleNamespace(asm={"ptx": ptx}, metadata=SimpleNamespace(shared=0))
    assert ahead.resources(compiled, 90).spilled == spilled
