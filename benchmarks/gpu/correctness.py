"""First of all: the kernels are right on this device, against the reference on the CPU and float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

import fxprec
from benchmarks.gpu.fragments import table_of
from benchmarks.gpu.suite import Row, Setting
from fxprec.gpu_check.ground import same_codes
from fxprec.numerics.formats import parse
from fxprec.numerics.reference import reference_decode, reference_encode, reference_stats
from fxprec.numerics.stats import Counts, gathered
from fxprec.runtime.gemm.matmul import Operand, Output, matmul
from fxprec.runtime.gemm.tiles import SMALL, TILES
from fxprec.runtime.gemm.transpose import quantize_transpose

FORMATS = ("e4m3fn", "e5m2_sat", "1-4-3+4", "1-5-2", "1-3-0", "1-6-9")
PAIRS = (("e4m3fn", "e5m2_sat"), ("1-4-3+4", "1-5-2"), ("1-6-9", "1-4-3+4"))


class WrongResult(Exception):
    """A kernel's result is not what the reference says."""


def correctness(setting: Setting) -> Iterator[Row]:
    """Yield one row a kernel; raise `WrongResult` where one is wrong, since its speed would say nothing."""
    yield _codes(setting)
    yield from _products(setting)
    if setting.no_fp8 is None:
        yield _native(setting)
    if not setting.tiny or not setting.compiles:
        yield _step(setting)


def _codes(setting: Setting) -> Row:
    rows, columns = (67, 131) if setting.tiny else (517, 1031)
    x = torch.randn(rows, columns) * 2.0 ** torch.randint(-30, 30, (rows, columns))
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    for name in FORMATS[::3] if setting.tiny else FORMATS:
        fmt = parse(name)
        for source in (x, x.bfloat16()):
            q, t, counters = quantize_transpose(source.to(setting.device), table_of([name], setting.device, 3)[0], fmt)
            wanted, stats = reference_encode(source.float() * 8.0, fmt), reference_stats(source.float() * 8.0, fmt)
            nans = source.isnan()
            same_codes(f"codes of {name}", q, wanted, fmt, nans)
            same_codes(f"transposed codes of {name}", t, wanted.t(), fmt, nans.t())
            counts = Counts(*gathered(counters)[0].tolist())
            if (counts.overflow, counts.underflow) != (stats.overflow, stats.underflow):
                raise WrongResult(f"quantize+transpose to {name} counts {counts}, not {stats}")
    return Row("correct", "quantize+transpose, differing codes", 0, "", "0", True, {"formats": FORMATS})


def _products(setting: Setting) -> Iterator[Row]:
    m, k, n = (37, 70, 45) if setting.tiny else (517, 1030, 389)
    tiles = (SMALL,) if setting.tiny and not setting.compiles else TILES
    arch = 80
    if setting.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(setting.device)
        arch = 10 * major + minor
    for first, second in PAIRS[1:2] if setting.tiny else PAIRS:
        a, b = parse(first), parse(second)
        qa, qb = reference_encode(torch.randn(m, k), a), reference_encode(torch.randn(k, n), b)
        wide = [reference_decode(q, f, torch.float64) for q, f in ((qa, a), (qb, b))]
        operands = Operand(qa.to(setting.device), a), Operand(qb.to(setting.device), b)
        worst = 0.0
        for tile in tiles:
            if tile.least_arch <= arch:
                found, _ = matmul(*operands, tile=tile)
                bound = k * 2.0**-24 * (wide[0].abs() @ wide[1].abs())  # roundings of float32 sums, any order
                worst = max(worst, float(((found.cpu().double() - wide[0] @ wide[1]).abs() / bound).max()))
        if not worst <= 1:
            raise WrongResult(f"generated gemm {first} x {second}: {worst:.3g} times the error float32 sums may have")
        _check_codes(operands, parse(second), setting)
        yield Row("correct", f"generated gemm {first} x {second}, error/bound", worst, "", "<= 1", True)


def _check_codes(operands: tuple[Operand, Operand], out: fxprec.Format, setting: Setting) -> None:
    tile = SMALL if not setting.compiles else TILES[-1]
    row = table_of([out.name], setting.device, -2)[0]
    plain, _ = matmul(*operands, dtype=torch.bfloat16, tile=tile)
    codes, _ = matmul(*operands, dtype=torch.bfloat16, out=Output(out, row), tile=tile)
    if not torch.equal(codes.cpu().long(), reference_encode(plain.cpu().float() * 0.25, out).long()):
        raise WrongResult(f"codes of a product in {out.name} differ from the reference")


def _native(setting: Setting) -> Row:
    m, k, n = (48, 64, 32) if setting.tiny else (512, 1024, 384)
    a, b = torch.randn(m, k).to(torch.float8_e5m2), torch.randn(n, k).to(torch.float8_e4m3fn)
    wanted = a.double() @ b.double().t() / 8
    scale, one = (torch.tensor(v, device=setting.device) for v in (0.125, 1.0))
    operands = a.to(setting.device), b.to(setting.device).t()
    found = torch._scaled_mm(*operands, scale_a=scale, scale_b=one, out_dtype=torch.bfloat16)
    error = float((found.cpu().double() - wanted).norm() / wanted.norm())
    if not error < 4e-3:  # bfloat16's rounding is 1.7e-3 in this norm
        raise WrongResult(f"_scaled_mm is off by {error:.3g}")
    return Row("correct", "_scaled_mm e5m2 x e4m3fn, error", error, "", "< 4e-3", True)


def _step(setting: Setting) -> Row:
    """A small model's gradients over codes, compiled, against torch's products of the same codes, and float32."""
    torch.manual_seed(0)
    width = 32 if setting.tiny else 256
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).to(setting.device)
    x = torch.randn(4 * width, width, device=setting.device)
    plain = _gradients(model, x)
    found: list[list[Tensor]] = []
    lowering: Literal["auto", "eager"]
    for lowering in ("auto" if setting.compiles else "eager", "eager"):
        torch.compiler.reset()
        config = fxprec.Config(recipe="fp8", low_ratio=1.0, gemms="low", lowering=lowering)
        found.append(_gradients(torch.compile(model, backend=fxprec.Backend(config)), x))
    same, error = _distance(*found), _distance(found[0], plain)
    if not (same < 1e-2 and error < 0.2):
        raise WrongResult(f"gradients over codes: {same:.3g} from lowering='eager', {error:.3g} from float32")
    detail = {"from_eager": same, "from_float32": error}
    return Row("correct", "gradients of an fp8 step, error to fp32", error, "", "< 0.2", True, detail)


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    for _ in range(3):  # the first steps' scales are not measured yet
        model.zero_grad()
        model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).double().norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True))
