"""Item 2: kernels that round: codes, transposed codes and counts, bit for bit against the CPU's reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from fxprec.gpu_check.ground import Ground, require, same, same_codes
from fxprec.gpu_check.samples import hard_numbers, table_of
from fxprec.ir.symbolic import MEASURE
from fxprec.numerics import ahead, stats
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.reference import reference_decode, reference_encode, reference_stats
from fxprec.numerics.rows import format_row
from fxprec.runtime.gemm import kernels, totals
from fxprec.runtime.gemm.transpose import quantize_transpose, transpose

FORMATS = ("e4m3fn", "e5m2_sat", "1-4-3+4", "1-5-2", "1-3-0", "1-6-9", "fp16_sat")
EVERY_LAYOUT = ("e4m3fn", "1-4-3+4")  # each layout is compiled; the other formats take the first two layouts
EXPONENT = 3


def check(ground: Ground) -> None:
    """Launch every kernel in the layouts, dtypes and sizes that compile to different code."""
    for name in FORMATS:
        with ground.case(f"quantize+transpose to {name}"):
            _codes(ground, parse(name), None if name in EVERY_LAYOUT else 2)
    with ground.case("codes that keep inf and NaN"):
        _kept(ground, parse("e5m2_sat"))
    with ground.case("transpose of codes"):
        _transposes(ground)
    with ground.case("totals of parts"):
        _totals(ground)
    with ground.case("totals of striped counters"):
        _gathered(ground)


def compile_ahead(ground: Ground) -> None:
    """Compile the kernels for each architecture; for the first also with one row, which becomes a constant."""
    for arch in ahead.ARCHITECTURES:
        with ground.case(f"sm_{arch}"):
            first, *others = (case for case in kernels.cases(arch, quick=True) if not case.name.startswith("gemm"))
            if arch == ahead.ARCHITECTURES[0]:
                ahead.compile_for(
                    first.kernel, first.signature | {"m": "i32:1"}, first.constants, arch, **first.options
                )
            for case in (first, *others):
                case.compile(arch)


def layouts(ground: Ground) -> Iterator[tuple[str, Tensor]]:
    """Yield matrices on the CPU that differ in the properties on which Triton specialises."""
    sizes = [(512, 1024), (517, 1031), (1, 256), (256, 1), (3, 16)] if ground.on_gpu else [(64, 32), (5, 131), (1, 33)]
    for m, n in sizes:
        yield f"{m} x {n}", hard_numbers(m, n)
    m, n = sizes[1]
    yield "column-major", hard_numbers(m, n).t().contiguous().t()
    yield "every second row", hard_numbers(2 * m, n)[::2]
    yield "not aligned", hard_numbers(m * n + 1).view(-1)[1:].view(m, n)
    yield "bfloat16", hard_numbers(m, n).bfloat16()
    yield "float16", hard_numbers(m, n).half()


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on a device with its strides and its storage offset, which a copy alone would lose."""
    flat = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def _codes(ground: Ground, fmt: Format, number: int | None) -> None:
    row = table_of([fmt.name], ground.device, exponent=EXPONENT)[0]
    for name, x in islice(layouts(ground), number):
        q, t, counters = quantize_transpose(moved(x, ground.device), row, fmt)
        scaled = x.float() * 2.0**EXPONENT
        wanted = reference_encode(scaled, fmt)
        same_codes(f"codes, {name}", q, wanted.contiguous(), fmt, x.isnan())
        same_codes(f"transposed codes, {name}", t, wanted.t().contiguous(), fmt, x.t().isnan())
        counts, right = stats.Counts(*stats.gathered(counters.cpu())[0].tolist()), reference_stats(scaled, fmt)
        found = (counts.overflow, counts.underflow, counts.elements)
        require(found == (right.overflow, right.underflow, x.numel()), f"counts {found}, not {right}, {name}")
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    _, t, counters = quantize_transpose(moved(finite, ground.device), row, fmt, row_major=False)
    same("transposed codes alone", t, reference_encode(finite.float() * 2.0**EXPONENT, fmt).t().contiguous())
    amax = stats.Counts(*stats.gathered(counters.cpu())[0].tolist()).amax
    require(amax == float(finite.float().abs().max()), f"amax is {amax}")


def _kept(ground: Ground, fmt: Format) -> None:
    x = hard_numbers(33, 65)
    q, t, _ = quantize_transpose(x.to(ground.device), table_of([fmt.name], ground.device)[0], fmt, keep=True)
    same("transposed codes", t, q.t().contiguous())
    finite, back = x.isfinite(), reference_decode(q.cpu(), fmt)
    same("codes of finite numbers", q.cpu()[finite], reference_encode(x[finite], fmt))
    require(bool(back[x.isnan()].isnan().all()), "a NaN became a number")
    require(not bool(back[x.isinf()].isfinite().any()), "an inf became a number")


def _transposes(ground: Ground) -> None:
    for dtype, top in ((torch.uint8, 256), (torch.uint16, 1 << 16)):
        for m, n in ((64, 256), (67, 131), (1, 40), (40, 1)):
            codes = torch.randint(0, top, (m, n)).to(dtype)
            on_device = codes.to(ground.device)
            same(f"{dtype} {m} x {n}", transpose(on_device), codes.t().contiguous())
            same(f"{dtype} {m} x {n} back", transpose(on_device.t()), codes)


def _totals(ground: Ground) -> None:
    """Compare the sums of four casts, counted in parts side by side, with those of the CPU's code."""
    fmt, outer = parse("e4m3fn"), 2
    table = table_of(["e4m3fn"] * 4, torch.device("cpu"), exponent=1, measure=True)
    table[1, MEASURE] = 0
    # Row, parts, elements of each, measured, short.
    cases = ((2, 700, 30, False, False), (0, 1100, 8, True, True), (1, 1, 5, True, False), (3, 9, 40, False, True))
    parts = []
    for _, size, length, measured, short in cases:
        x = torch.randn(outer, size, length) * 10 ** torch.randn(outer, size, length)
        parts.append(stats.count_parts(x, x * 2.0, format_row(fmt), (-1,), measured, short))
    counts, moments = (
        torch.cat([number for part in parts for number in part if number.dtype == dtype], -1)
        for dtype in (torch.int32, torch.float32)
    )
    elements = [outer * size * length for _, size, length, *_ in cases]
    sites = stats.parts_of(
        [c[0] for c in cases],
        [c[1] for c in cases],
        elements,
        [c[3] for c in cases],
        [True] * len(cases),
        [c[4] for c in cases],
    )
    wanted = stats.totals(counts, moments, table, sites)
    on_device = [x.to(ground.device) for x in (counts, moments, table)]
    _near(totals.totals(on_device[0], on_device[1], on_device[2], sites), wanted)


def _gathered(ground: Ground) -> None:
    counters = torch.randint(0, 1000, (3 * stats.SITE_COUNTERS,), dtype=torch.int32)
    view = counters.view(3, stats.STRIPES + 1, stats.COLUMNS)
    view[:, : stats.STRIPES, stats.SUMS :] = torch.randn(3, stats.STRIPES, 3, dtype=torch.float64).view(torch.int32)
    view[:, stats.STRIPES, 4] = torch.tensor([0, 1, 1], dtype=torch.int32)
    _near(totals.gathered(counters.to(ground.device)), stats.gathered(counters))


def _near(found: Tensor, wanted: Tensor) -> None:
    """Require equal counts and maxima; moments are float64 sums in another order and may differ by rounding."""
    found = found.cpu()
    same("counts and maxima", found[:, :5], wanted[:, :5])
    worst = float((found - wanted).abs().div(wanted.abs().clamp_min(1.0)).max())
    require(worst <= 1e-12 and not math.isnan(worst), f"sums of moments are off by {worst:.3g}, relative")
