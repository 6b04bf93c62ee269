"""What a GPU's code launches and moves, counted: exact figures, so that a kernel more or a pass more over memory fails."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed

from benchmarks.gpu.absent import GPUS
from benchmarks.gpu.roofline import table
from benchmarks.gpu.roofline.count import Counted, count, written
from benchmarks.gpu.roofline.estimate import B200, H100, Cost, Half
from benchmarks.gpu.roofline.issue import Issue
from benchmarks.gpu.roofline.minimum import minimum
from benchmarks.gpu.roofline.replay import Launch, Memory, replay
from benchmarks.gpu.roofline.sides import NETWORKS, SIDES, Network, Side
from benchmarks.gpu.roofline.traffic import KernelText
from benchmarks.gpu.sass import Mix, code_of, read
from fxprec.passes.analysis.gemm_costs import costs_of
from fxprec.runtime.gemm import kernels
from fxprec.runtime.gemm.tiles import TILES

SMALL = NETWORKS["small"]
KERNEL = """
@triton.jit
def triton_poi_fused_0(in_ptr0, in_ptr1, in_out_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x0 + 8*((x1 // 2) % 3)), xmask)
    tmp1 = tl.load(in_ptr0 + (8 + x0), xmask)
    tmp2 = tl.load(in_ptr1 + (3))
    tmp3 = tl.load(in_out_ptr0 + (x0), xmask)
    tmp4 = tl.load(in_out_ptr0 + (x0), xmask, other=0.0)
    tl.store(in_out_ptr0 + (x0), tmp3, xmask)
    tl.store(out_ptr0 + (x0), tmp1, xmask)
"""


def test_a_pointer_counts_once_and_no_more_than_the_kernel_reaches() -> None:
    text = KernelText.parse(KERNEL)
    assert text.pointers == ("in_ptr0", "in_ptr1", "in_out_ptr0", "out_ptr0")
    # 100 of 1,000 elements are read at two places, one scalar, 100 elements read and written in place, 100 written.
    read, written = text.traffic(elements=[1000, 50, 100, 100], item_bytes=[4, 4, 2, 1], extent=100)
    assert (read, written) == (200 * 4 + 50 * 4 + 100 * 2, 100 * 2 + 100)


def test_products_and_attention_are_counted_by_dtype() -> None:
    def of(*shape: int, dtype: torch.dtype) -> Memory:
        return Memory.of(torch.empty(shape, dtype=dtype, device="meta"))

    codes = [of(64, 32, dtype=torch.float8_e4m3fn), of(32, 16, dtype=torch.float8_e5m2)]
    product = Cost.of(Launch("_scaled_mm", tuple(codes), (of(64, 16, dtype=torch.bfloat16),), 2560, 2048), H100)
    assert (product.kind, product.flops, product.dtype) == ("gemm", 2 * 64 * 32 * 16, "fp8")
    assert product.seconds == pytest.approx(4e-6 + 4608 / 3.0e12)
    bound = Cost.of(Launch("triton_k", tuple(codes), (), 2560, 2048), H100, cycles=10**9)
    assert bound.by_bytes == product.seconds, "the same bytes"
    assert bound.seconds == pytest.approx(4e-6 + 1e9 / (4 * 132 * 1.83e9)), "a scheduler issues an instruction a cycle"
    heads = of(2, 4, 128, 64, dtype=torch.bfloat16)
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    attention = Cost.of(Launch(name, (heads,) * 5, (heads,) * 3, 0, 0), H100)
    assert (attention.kind, attention.flops) == ("attention", 5 * 2 * 2 * 4 * 128 * 128 * 64 / 2)
    slower = Cost.of(Launch(name.replace("flash", "efficient"), (heads,) * 5, (heads,) * 3, 0, 0), H100)
    assert (attention.dtype, slower.dtype) == ("attention flash", "attention efficient")
    assert slower.seconds > 2 * attention.seconds - H100.launch_seconds


SASS = """
        /*0000*/                   LDG.E R0, desc[UR4][R2.64] ;
        /*0010*/                   ISETP.GE.AND P0, PT, R0, R1, PT ;
        /*0020*/              @!P0 EXIT ;
        /*0030*/                   LOP3.LUT R0, R0, 0x7, RZ, 0xc0, !PT ;
        /*0040*/                   BRA.DIV UR4, 0x00c0 ;
        /*0050*/              @P1  BRA 0x0080 ;
        /*0060*/                   MUFU.LG2 R4, R0 ;
        /*0070*/                   FFMA R4, R4, R4, R4 ;
        /*0080*/                   FADD R5, R5, R4 ;
        /*0090*/              @P0  BRA 0x0030 ;
        /*00a0*/                   STG.E desc[UR4][R2.64], R5 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   BRA 0x0050 ;
"""


def test_instructions_are_counted_once_and_by_turn_without_the_longer_side_of_a_branch() -> None:
    code = read(SASS, warps=2)
    assert code.loops == (Mix(full=4, half=1),), "the logarithm is left out, as that of moments that nobody asks for"
    assert code.once == Mix(full=4, half=1), "a program leaves early only where it has no turn to take"
    assert code.cycles(turns=10) == 2 * ((4 + 2) + 10 * (4 + 2))
    assert Mix.of("MUFU.LG2").cycles == 8


def test_products_in_blocks_count_codes_of_4_and_of_8_bits() -> None:
    def of(*shape: int, dtype: torch.dtype = torch.uint8) -> Memory:
        return Memory.of(torch.empty(shape, dtype=dtype, device="meta"))

    operands, y = (of(64, 32), of(16, 32), of(512), of(512)), (of(64, 16, dtype=torch.bfloat16),)
    eight = Cost.of(Launch("fxprec.scaled_mm.default", operands, y, 3584, 2048), B200)
    assert (eight.kind, eight.flops, eight.dtype) == ("gemm", 2 * 64 * 32 * 16, "fp8")
    whole = of(1, dtype=torch.float32)
    four = Cost.of(Launch("fxprec.scaled_mm.default", (*operands, whole, whole), y, 3592, 2048), B200)
    assert (four.kind, four.flops, four.dtype) == ("gemm", 2 * 64 * 64 * 16, "fp4")
    assert B200.flops["fp4"] == 2 * B200.flops["fp8"]


@pytest.mark.parametrize("arch", [80, 90, *(pytest.param(arch, marks=pytest.mark.full) for arch in (89, 100))])
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another Triton issues other instructions")
def test_a_generated_gemm_is_as_fast_as_its_loop_issues(arch: int) -> None:
    """``gemm_costs.json`` had 4.7e14 for an H100, a guess; its loop allows less than half of that."""
    costs = costs_of(GPUS[arch])
    tile = next(tile for tile in TILES if tile.least_arch <= arch)
    for a, b, out, rate in (
        ("1-4-3+4", "1-5-2", "1-5-2", costs.generated_flop_per_s),
        ("e4m3fn", "e5m2_sat", None, costs.generated_special_flop_per_s),
    ):
        code = code_of(kernels.product(a, b, out, tile).compile(arch))
        cycles = sum(code.loops, Mix()).cycles * code.warps / 4
        counted = 2 * tile.rows * tile.columns * tile.depth / cycles * costs.multiprocessors * costs.clock_hz
        assert rate == pytest.approx(counted, rel=0.03)


def test_expanded_memory_counts_once() -> None:
    assert Memory.of(torch.empty(1, 8, device="meta").expand(100, 8)).bytes == 32


def _check_choice(found: Counted) -> None:
    """The plan says what was estimated, and that is as many bytes as the code moves, within 6 %."""
    assert found.plan is not None
    choice = found.plan.lowering
    assert choice is not None
    assert choice.estimate is not None
    forward, backward = choice.estimate.forward, choice.estimate.backward
    assert forward is not None
    assert backward is not None
    assert (choice.chosen, forward.chosen, backward.chosen) == ("inductor",) * 3
    assert (forward.inductor.launches, forward.inductor.bytes) == (17, 6_795_464)
    assert (forward.triton.launches, forward.triton.bytes) == (17, 6_981_056)
    assert (backward.inductor.launches, backward.inductor.bytes) == (18, 7_927_376)
    for half, counted in ((forward, found.forward), (backward, found.backward)):
        assert half.inductor.bytes == pytest.approx(counted.bytes(), rel=0.06)


@pytest.mark.inductor
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch's Inductor fuses otherwise")
def test_a_block_in_fp8_launches_and_moves_no_more_than_it_did() -> None:
    side = SIDES["fp8 1 high"]
    assert side.options is not None
    found = count(replace(side, options={**side.options, "gemms": "low"}), SMALL)
    forward, backward = found.forward, found.backward
    assert (len(forward.costs), len(backward.costs)) == (22, 31)
    assert (forward.bytes(), backward.bytes()) == (6_920_352, 8_413_716)
    assert (forward.peak, backward.peak, backward.saved) == (1_810_744, 3_150_148, 1_185_808)
    _check_choice(found)
    least = minimum(SMALL, H100)
    done = forward.flops() + backward.flops()
    assert done["fp8"] + done["attention cudnn"] == done.total() == least.low_flops + least.high_flops
    assert 0 < found.seconds_by_bytes < found.seconds
    (row,) = (line for line in table.lines({"fp8": found}, least, H100) if line.startswith("| fp8 "))
    assert row.startswith("| fp8 | 53 |")


def encoder_half() -> nn.Module:
    """The MLP of a transformer's encoder behind its norm: biases, whose gradients are sums over rows, and GELU."""
    return nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


@pytest.mark.inductor
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch's Inductor fuses otherwise")
def test_a_gradient_is_counted_in_the_kernel_that_sums_its_bias() -> None:
    """No mask an element is written for the counts, and no float32 gradient for a norm's sums."""
    found = count(SIDES["fp8 1 high"], Network("mlp", encoder_half, (32, 512, 1024)))
    element = 32 * 512 * 4096
    (gelu,) = (cost for cost in found.backward.costs if "gelu_backward" in cost.name)
    assert "bool" not in gelu.what
    assert gelu.written < 1.5 * element  # codes, a byte each, and sums
    assert found.backward.peak < 6 * element  # four masks more, by torch's own limits


@pytest.mark.inductor
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch's Inductor fuses otherwise")
@pytest.mark.filterwarnings("ignore:storage=", "ignore:weigh-gemms")
def test_a_gradient_of_decoded_codes_is_written_in_16_bits_alone() -> None:
    """The operators that decode were one kernel too many: Inductor wrote GELU's gradient in float32 for the bias's sum."""
    found = count(SIDES["fp8 1 high"], Network("mlp", encoder_half, (32, 512, 1024)), 80)
    element = 32 * 512 * 4096
    (gelu,) = (cost for cost in found.backward.costs if "gelu_backward" in cost.name)
    assert "u" in gelu.what.partition("->")[0], "it reads codes"
    assert "f32" not in gelu.what.partition("->")[2]
    assert gelu.written == 4 * element, "the gradient, and GELU's result for the weight's gradient, in bf16"


def test_torchao_is_left_out_with_a_reason_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert SIDES["fp8 1 high"].absent is None
    assert {side.absent for side in SIDES.values() if side.torchao} == {
        "torchao is not installed (pip install --no-deps torchao)"
    }


@pytest.mark.inductor
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_multiplies_codes_and_patches_nothing() -> None:
    from torch._inductor.codegen.triton import TritonOverrides

    before = TritonOverrides.maximum
    found = count(Side("tensorwise", autocast=True, torchao="tensorwise"), SMALL)
    done, least = found.forward.flops() + found.backward.flops(), minimum(SMALL, H100)
    assert done["fp8"] == least.low_flops
    assert done["attention cudnn"] == least.high_flops
    assert TritonOverrides.maximum is before


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 128, bias=False))


@pytest.mark.inductor
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch's Inductor fuses otherwise")
@pytest.mark.parametrize(
    ("name", "launches", "num_bytes", "rate"),
    [
        ("nvfp4", (12, 27), (2_530_856, 4_568_632), "fp4"),
        ("torchao mxfp8", (15, 10), (1_210_368, 796_672), "fp8"),
        ("torchao nvfp4", (8, 12), (1_159_212, 757_872), "fp4"),
    ],
)
def test_a_linear_layer_multiplies_three_products_in_blocks(
    name: str, launches: tuple[int, int], num_bytes: tuple[int, int], rate: str
) -> None:
    if (reason := SIDES[name].absent) is not None:
        pytest.skip(reason)
    code = written(SIDES[name], Network("linear", linear, (2, 128, 256)), 100)
    forward = replay(code["forward"])
    backward = replay(code["backward"], forward)
    first, second = (Half.of(half, B200, Issue(100, {})) for half in (forward, backward))
    assert (len(first.costs), len(second.costs)) == launches
    assert (first.bytes(), second.bytes()) == num_bytes
    assert (first.flops() + second.flops())[rate] == 3 * 2 * 256 * 256 * 128


def test_blocks_are_not_counted_for_a_gpu_that_multiplies_none() -> None:
    reason = "the GPU's tensor cores do not multiply operands in blocks (--gpu b200)"
    assert {side.left_out(90) for side in SIDES.values() if side.multiplies_blocks} == {reason}
    assert SIDES["mxfp8"].left_out(100) is None


def test_sides_in_fp8_are_compared_with_the_fastest_of_torchao() -> None:
    def taking(seconds: float) -> Counted:
        half = Half((Cost("k", "memory", 0, 0, 0.0, "", seconds, ""),), 0, 0)
        return Counted(half, half, None)

    found = {"autocast": taking(2), "fp8 1 high": taking(1), "torchao a": taking(1.6), "torchao b": taking(1.25)}
    *_, last = table.lines(found, minimum(SMALL, H100), H100)
    assert last == "time against torchao's best, torchao b: fp8 1 high 0.80"
    found |= {"mxfp8": taking(0.9), "torchao mxfp8": taking(0.6)}
    *_, fp8, blocks = table.lines(found, minimum(SMALL, H100), H100)
    assert (fp8, blocks) == (last, "time against torchao mxfp8: 1.50")
