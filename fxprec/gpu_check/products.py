"""Item 3: products of codes, by the generated kernel in every tile and by torch, within bounds of float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxprec.compat.observed import scaled_mm
from fxprec.gpu_check import block_products
from fxprec.gpu_check.ground import Ground, present, same, within
from fxprec.gpu_check.samples import table_of
from fxprec.numerics import ahead
from fxprec.numerics.formats import parse
from fxprec.numerics.reference import reference_decode, reference_encode
from fxprec.runtime.gemm import kernels
from fxprec.runtime.gemm.matmul import Operand, Output, matmul
from fxprec.runtime.gemm.tiles import SMALL, TILES, Tile

PAIRS = (("e4m3fn", "e5m2_sat"), ("1-4-3+4", "1-5-2"), ("1-6-9", "1-4-3+4"))
SUM = 2.0**-23  # error of one float32 addition that truncates, relative to the sum of magnitudes
FP8_SUM = 2.0**-13  # tensor cores of sm_89 and sm_90 add 8-bit products in about 14 bits
FP8_DEPTH = 32  # products that one such instruction adds
NATIVE = (("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fn", "e5m2"))


def check(ground: Ground) -> None:
    """Multiply in sizes that no tile divides, with every tile and with the tile that tuning selects."""
    m, k, n = (517, 1030, 389) if ground.on_gpu else (37, 70, 45)
    tiles = [t for t in TILES if t.least_arch <= ground.architecture] if ground.on_gpu else [SMALL]
    for first, second in PAIRS:
        with ground.case(f"generated {first} x {second}"):
            _generated(ground, first, second, (m, k, n), tiles, is_first=(first, second) == PAIRS[0])
        with ground.case(f"generated {first} x {second} to {second}"):
            _encoded(ground, first, second, (m, k, n), tiles[-1])
    block_products.check(ground)
    if ground.on_gpu and ground.architecture < 89:
        ground.leave_out("_scaled_mm", f"sm_{ground.architecture} has no products of 8-bit floats")
        return
    for first, second in NATIVE:
        with ground.case(f"_scaled_mm {first} x {second}"):
            _native(ground, first, second)


def compile_ahead(ground: Ground) -> None:
    """Compile the generated GEMM in each tile for each architecture."""
    for arch in ahead.ARCHITECTURES:
        with ground.case(f"sm_{arch}"):
            for case in kernels.cases(arch, quick=True):
                if case.name.startswith("gemm"):
                    case.compile(arch)


def _generated(
    ground: Ground, first: str, second: str, sizes: tuple[int, int, int], tiles: Sequence[Tile], *, is_first: bool
) -> None:
    """Try every tile, for the first pair also the tuned tile, and one tile with the right operand column-major."""
    m, k, n = sizes
    a, b = (parse(name) for name in (first, second))
    qa, qb = reference_encode(torch.randn(m, k), a), reference_encode(torch.randn(k, n), b)
    wide = [reference_decode(q, f, torch.float64) for q, f in ((qa, a), (qb, b))]
    bias = torch.randn(n)
    bound = (k + 1) * SUM * (wide[0].abs() @ wide[1].abs() + bias.abs().double())
    wanted = wide[0] @ wide[1] + bias.double()
    left = Operand(qa.to(ground.device), a)
    worst = 0.0
    for right, tried in ((qb, (*tiles, None) if is_first else tiles), (qb.t().contiguous().t(), tiles[-1:])):
        operands = left, Operand(right.to(ground.device), b)
        for tile in tried:
            found, _ = matmul(*operands, bias.to(ground.device), tile=tile)
            worst = max(worst, float(((found.cpu().double() - wanted).abs() / bound).nan_to_num(torch.inf).max()))
    ground.fact(f"{first} x {second}, error over its bound", round(within("error over its bound", worst, 1.0), 4))


def _encoded(ground: Ground, first: str, second: str, sizes: tuple[int, int, int], tile: Tile) -> None:
    m, k, n = sizes
    a, out = parse(first), parse(second)
    operands = [
        Operand(reference_encode(torch.randn(shape), fmt).to(ground.device), fmt)
        for shape, fmt in (((m, k), a), ((k, n), out))
    ]
    plain, _ = matmul(operands[0], operands[1], dtype=torch.bfloat16, tile=tile)
    row = table_of([out.name], ground.device, exponent=-2)[0]
    codes, _ = matmul(operands[0], operands[1], dtype=torch.bfloat16, out=Output(out, row), tile=tile)
    same("codes of the product", codes, reference_encode(plain.cpu().float() * 0.25, out))


def _native(ground: Ground, first: str, second: str) -> None:
    """Multiply with and without bias, to float32 and bfloat16, with fast and with exact accumulation."""
    m, k, n = (512, 1024, 384) if ground.on_gpu else (48, 64, 32)
    left, right = (present(parse(name).torch_dtype, f"torch has no dtype for {name}") for name in (first, second))
    a, b = torch.randn(m, k).to(left), torch.randn(n, k).to(right)
    wide, size = a.double() @ b.double().t() / 8, a.double().abs() @ b.double().abs().t() / 8
    scale, one = (torch.tensor(v, device=ground.device) for v in (0.125, 1.0))
    operands, bias = (a.to(ground.device), b.to(ground.device).t()), torch.randn(n).bfloat16()
    for dtype, with_bias in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
        for fast in (False, True):
            given = bias.to(ground.device) if with_bias else None
            found = scaled_mm(*operands, scale_a=scale, scale_b=one, bias=given, out_dtype=dtype, use_fast_accum=fast)
            wanted = wide + bias.double() if with_bias else wide
            steps = k // FP8_DEPTH if fast else 4  # exact sums are moved to float32 after 128 products
            bound = (steps + FP8_DEPTH) * FP8_SUM * size + _rounding(wanted, dtype)
            what = f"{dtype}{', bias' if with_bias else ''}{', fast' if fast else ''}: error over its bound"
            within(what, float(((found.cpu().double() - wanted).abs() / bound).nan_to_num(torch.inf).max()), 1.0)


def _rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half a unit in the last place, and as much again for a sum beside a rounding border."""
    return x.abs() * torch.finfo(dtype).eps
