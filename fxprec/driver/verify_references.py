"""Compute what each kernel of a GPU's lowered graph should return, with plain torch, and compare within tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxprec.ir import symbolic
from fxprec.ir.calls import FakeCall
from fxprec.kernels import casts, coded_gemms
from fxprec.kernels.counts import GATHERED, Totals
from fxprec.numerics import block_codec, stats
from fxprec.numerics.codec import decode_bits
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.rows import format_row
from fxprec.numerics.stats import COLUMNS, SITE_COUNTERS, STRIPES, SUMS, UNMEASURED, WIDTH, Counts, finish
from fxprec.runtime.gemm.reference_ops import numbers, transposed

aten = torch.ops.aten
MAX_DIFFERING = 0.02
"""Share of a tensor's codes that may be neighbours of the reference's, for kernels that sum rows or compute exp."""
TOLERANCE = 2e-5
"""Error bound relative to the tensor's largest magnitude, for float32 sums of 8192 numbers in another order. A sum that
cancels to a small number has an error as large as any other."""
GENERATED_GEMM, NATIVE_GEMM = 1e-4, 4e-3
"""Bounds relative to the sum of the products' magnitudes. Tensor cores add products of 8-bit floats in fewer bits."""


@dataclass(frozen=True)
class Checked:
    """The correct result of a kernel call, and why the kernel's result is wrong, or None."""

    wanted: object
    reason: str | None


Reference = Callable[..., Checked]


def difference(
    found: torch.Tensor, wanted: torch.Tensor, name: str, *, exact: bool, fmt: Format | None = None
) -> str | None:
    """Return how two results differ beyond the tolerance, or None. ``fmt``: the format of codes."""
    if exact:
        same = (_bits(found) == _bits(wanted)) | (_is_nan(found) & _is_nan(wanted))
        count = int((~same).sum())
        return f"{count} of {found.numel()} elements of {name} differ from the reference's" if count else None
    if found.dtype == torch.float32:
        limit = TOLERANCE * float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max()) if wanted.numel() else 0.0
        close = torch.isclose(found, wanted, rtol=TOLERANCE, atol=limit, equal_nan=True)
        count = int((~close).sum())
        return f"{count} of {found.numel()} elements of {name} are off by more than {TOLERANCE:g}" if count else None
    mine, theirs = (_place(_bits(x), 8 * x.itemsize if fmt is None else fmt.bits) for x in (found, wanted))
    steps = (mine - theirs).abs()
    is_far = steps > 1
    if fmt is not None or found.dtype in (torch.bfloat16, torch.float16):  # a sum may cancel to less than its error
        wide, goal = (_numbers(x, fmt) for x in (found, wanted))
        limit = TOLERANCE * float(goal.nan_to_num(0.0, 0.0, 0.0).abs().max()) if goal.numel() else 0.0
        is_far &= ~((wide - goal).abs() <= limit) & ~(wide.isnan() & goal.isnan())
    far, near = int(is_far.sum()), int((steps > 0).sum())
    if far or near > MAX_DIFFERING * found.numel() + 1:
        return (
            f"{near} of {found.numel()} codes of {name} differ from the reference's, {far} of them by more than one "
            "code"
        )
    return None


def _numbers(x: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    return x.to(torch.float32) if fmt is None else decode_bits(x.view(fmt.code_dtype), fmt)


def _place(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the rank of each code among the format's numbers: 0 for 0 and -0, 1 for the least positive number."""
    sign = 1 << (bits - 1)
    magnitude = codes & (sign - 1)
    return torch.where(codes & sign != 0, -magnitude, magnitude)


def _bits(x: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}[x.dtype.itemsize]
    return x.view(integer).to(torch.int64)


def _is_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.isnan(x) if x.dtype.is_floating_point else torch.zeros_like(x, dtype=torch.bool)


def statistics_differ(
    found: torch.Tensor, wanted: torch.Tensor, of_inexact: torch.Tensor | None = None
) -> torch.Tensor:
    """Return for each row of counts (n, `WIDTH`) whether it differs, (n,) bool.

    Ratios and largest magnitudes must agree to the last bit, except for rows ``of_inexact`` kernels (n, bool), whose
    values do not either. Moments have a tolerance, as their sums are reordered.
    """
    mine, theirs = (
        torch.tensor(finish(rows.cpu()), dtype=torch.float64, device="cpu").view(-1, 7) for rows in (found, wanted)
    )
    same = (mine[:, :3].nan_to_num() == theirs[:, :3].nan_to_num()).all(1)
    if of_inexact is not None:
        ratios = torch.isclose(mine[:, :2], theirs[:, :2], rtol=0.0, atol=MAX_DIFFERING, equal_nan=True).all(1)
        largest = torch.isclose(mine[:, 2], theirs[:, 2], rtol=TOLERANCE, atol=0.0, equal_nan=True)
        same |= of_inexact & ratios & largest
    near = torch.isclose(mine[:, 3:], theirs[:, 3:], rtol=1e-3, atol=1e-4, equal_nan=True).all(1)
    return ~(same & near)


def _first(reasons: Iterator[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _quantize_transpose(found: Sequence[torch.Tensor], *args: object) -> Checked:
    call = coded_gemms.QuantizeTranspose.with_tensors(*args)
    fmt, wide = parse(call.format), call.x.to(torch.float32)
    codes: torch.Tensor = symbolic.QUANTIZE(wide, call.table, call.row, call.format, call.storage)
    if call.keep:
        codes = symbolic.KEEP_CODES(codes.view(fmt.code_dtype), wide, call.format).view(codes.dtype)
    turned = transposed(codes)
    counts = _counts_of(wide, call.table, call.row, call.format) if call.stats else None
    counters = found[2] if counts is None else _striped(counts)

    def reasons() -> Iterator[str | None]:
        if call.row_major:
            yield difference(found[0], codes, "its codes", exact=True)
        yield difference(found[1], turned, "its transposed codes", exact=True)
        if counts is not None and bool(statistics_differ(stats.gathered(found[2]), counts.view(1, -1)).any()):
            yield f"its statistics of row {call.row} differ from the reference's"

    return Checked((codes if call.row_major else found[0], turned, counters), _first(reasons()))


def _counts_of(x: torch.Tensor, table: torch.Tensor, row: int, format: str, *, moments: bool = True) -> torch.Tensor:
    """Return a row of `Counts` of float32 ``x``, with moments if the table says that the row is measured."""
    scale, carried, measured = (int(table[row, column]) for column in (0, symbolic.CARRIED, symbolic.MEASURE))
    stored = x * 2.0**scale
    over, under, amax, elements = (float(n) for n in stats.count(x, stored, format_row(parse(format))))
    moments = moments and bool(measured)
    nonzero, squares, logs, squared_logs = map(float, stats.count_moments(stored)) if moments else UNMEASURED
    found = Counts(over, under, amax, elements, nonzero, squares, logs, squared_logs, carried, carried + scale)
    return torch.tensor(found, dtype=torch.float64, device=x.device)


def _striped(counts: torch.Tensor) -> torch.Tensor:
    """Return striped counters (`SITE_COUNTERS`,) whose sums are a row of `Counts`."""
    c = Counts(*counts.tolist())
    table = torch.zeros(STRIPES + 1, COLUMNS, dtype=torch.int32, device="cpu")
    first, facts = table[0], table[STRIPES]
    first[0], first[1], first[3] = int(c.overflow), int(c.underflow), max(int(c.nonzero), 0)
    first[2] = torch.tensor(c.amax, dtype=torch.float32, device="cpu").view(torch.int32)
    first[SUMS:] = torch.tensor(c[5:8], dtype=torch.float64, device="cpu").view(torch.int32)
    facts[:2] = torch.tensor([int(c.elements)], dtype=torch.int64, device="cpu").view(torch.int32)
    facts[2], facts[3], facts[4] = int(c.carried), int(c.moments_exp - c.carried), int(c.nonzero >= 0)
    return table.view(SITE_COUNTERS).to(counts.device)


@dataclass(frozen=True)
class _Product:
    """A float32 matrix product before rounding, and the error bound of each element."""

    value: torch.Tensor
    limit: torch.Tensor

    @classmethod
    def of(
        cls, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tolerance: float
    ) -> _Product:
        """Multiply ``a`` and ``b``. ``dtype``: the dtype that the kernel rounds the product to."""
        value, size = a @ b, a.abs() @ b.abs()
        if bias is not None:
            value, size = value + bias.to(torch.float32), size + bias.to(torch.float32).abs()
        step = torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0
        return cls(value, (tolerance * size + step * value.abs()).nan_to_num(0.0, 0.0, 0.0))

    def reason(self, found: torch.Tensor) -> str | None:
        wanted = self.value.to(found.dtype).to(torch.float32)
        wide = found.to(torch.float32)
        bad = ~((wide - wanted).abs() <= self.limit) & ~((wide == wanted) | (wide.isnan() & wanted.isnan()))
        count = int(bad.sum())
        return (
            f"{count} of {found.numel()} elements of its product are off by more than a reordered sum can be"
            if count
            else None
        )


def _coded_product(call: FakeCall) -> _Product:
    a = numbers(call.a, call.table, call.row_a, call.format_a)
    b = numbers(call.b, call.table, call.row_b, call.format_b)
    return _Product.of(a, b, call.bias, call.dtype, GENERATED_GEMM)


def _matmul_codes(found: torch.Tensor, *args: object) -> Checked:
    product = _coded_product(coded_gemms.MatmulCodes.with_tensors(*args))
    return Checked(product.value.to(found.dtype), product.reason(found))


def _matmul_to_codes(found: Sequence[torch.Tensor], *args: object) -> Checked:
    """Check that codes lie between those of the smallest and the largest product that a reordered sum may give."""
    call = coded_gemms.MatmulToCodes.with_tensors(*args)
    product = _coded_product(call)
    rounded = product.value.to(call.dtype).to(torch.float32)
    low, wanted, high = (
        symbolic.QUANTIZE(x, call.table, call.row, call.format, call.storage)
        for x in (rounded - product.limit, rounded, rounded + product.limit)
    )
    least, mine, most = (numbers(q, call.table, symbolic.AS_STORED, call.format) for q in (low, found[0], high))
    same = (_bits(found[0]) == _bits(wanted)) | (_is_nan(found[0]) & _is_nan(wanted))
    count = int((~same & ~((least <= mine) & (mine <= most))).sum())
    counts = _counts_of(rounded, call.table, call.row, call.format, moments=False)

    def reasons() -> Iterator[str | None]:
        if count:
            yield f"{count} of {found[0].numel()} codes of its product differ from the reference's"
        if call.stats:
            own = Counts(*stats.gathered(found[1]).flatten().tolist())
            theirs, slack = Counts(*counts.tolist()), MAX_DIFFERING * rounded.numel() + 1
            lost = max(abs(own.overflow - theirs.overflow), abs(own.underflow - theirs.underflow))
            amax = abs(own.amax - theirs.amax) > float(product.limit.max())
            if lost > slack or amax or own[3:] != theirs[3:]:
                yield f"its statistics of row {call.row} differ from the reference's"

    return Checked((wanted, _striped(counts) if call.stats else found[1]), _first(reasons()))


def _scaled_mm(
    found: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *rest: object,
) -> Checked:
    factors = a.to(torch.float32) * scale_a, b.to(torch.float32) * scale_b
    product = _Product.of(*factors, bias, found.dtype, NATIVE_GEMM)
    return Checked(product.value.to(found.dtype), product.reason(found))


def _totals(found: torch.Tensor, counts: torch.Tensor, moments: torch.Tensor, table: torch.Tensor, *of: Any) -> Checked:
    sites = stats.parts_of(*of)
    wanted = stats.totals(counts, moments, table, sites)
    return Checked(wanted.flatten(), _wrong_rows(found, wanted, [site.row for site in sites]))


def _gathered(found: torch.Tensor, counters: torch.Tensor) -> Checked:
    wanted = stats.gathered(counters)
    return Checked(wanted.flatten(), _wrong_rows(found, wanted, range(len(wanted))))


def _wrong_rows(found: torch.Tensor, wanted: torch.Tensor, rows: Sequence[int]) -> str | None:
    wrong = [
        row for row, bad in zip(rows, statistics_differ(found.view(-1, WIDTH), wanted).tolist(), strict=True) if bad
    ]
    return f"its sums of rows {', '.join(map(str, wrong[:5]))} differ from the reference's" if wrong else None


def _exact(made: Callable[..., torch.Tensor], what: str) -> Reference:
    """Return a bitwise check for a kernel that returns one tensor; ``made`` computes the reference."""

    def check(found: torch.Tensor, *args: object) -> Checked:
        wanted = made(*args)
        return Checked(wanted, difference(found, wanted.view(found.shape), what, exact=True))

    return check


REFERENCES: Mapping[object, Reference] = {
    coded_gemms.QuantizeTranspose.target: _quantize_transpose,
    coded_gemms.TRANSPOSE_CODES: _exact(transposed, "its codes"),
    coded_gemms.MATMUL_CODES: _matmul_codes,
    coded_gemms.MatmulToCodes.target: _matmul_to_codes,
    GATHERED: _gathered,
    Totals.target: _totals,
    aten._scaled_mm.default: _scaled_mm,
    casts.StoreBlocks.target: _exact(block_codec.stored, "its records"),
    casts.LoadBlocks.target: _exact(block_codec.loaded, "its values"),
}
"""Checks of kernels that do not overwrite inputs; called with the kernel's result and the call's arguments."""
GEMMS = (coded_gemms.MATMUL_CODES, coded_gemms.MatmulToCodes.target, aten._scaled_mm.default)


def name_of(node: Node, args: Sequence[Any]) -> str:
    """Return the name of a call's kernel in messages and in `lower`, for a call in `REFERENCES`."""
    kernel = coded_gemms.kernel_called(node)
    if kernel is not None:
        return kernel.name
    return (
        coded_gemms.native_name(*args[:2]) if node.target is aten._scaled_mm.default else f"{node.name} ({node.target})"
    )
