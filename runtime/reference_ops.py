"""Reference implementations of the symbolic ops: slow, obvious, on any device. The eager lowering runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxprec.ir.symbolic import (
    AS_STORED,
    CARRIED,
    HISTOGRAM_BINS,
    MEASURE,
    CorrectScales,
    Count,
    Damage,
    Dequantize,
    Draw,
    Histogram,
    InMemory,
    KeepCodes,
    KeepNonfinite,
    Observe,
    PackBits,
    Quantize,
    Rescale,
    Rotate,
    TensorScale,
    UnpackBits,
    is_in_blocks,
    stored_dtype,
)
from fxprec.kernels.counts import Ln
from fxprec.kernels.layout import SideBySide
from fxprec.numerics import bits, block_codec, eden, hadamard
from fxprec.numerics.blocks import find_blocks
from fxprec.numerics.formats import E4M3FN_NAN, E5M2, Format, kept_codes, parse
from fxprec.numerics.reference import (
    Grid,
    reference_decode,
    reference_encode,
    reference_quantize,
    reference_round,
    reference_stats,
)
from fxprec.numerics.rows import FormatRow, row_of
from fxprec.numerics.stats import UNMEASURED, Counts
from fxprec.runtime.scaling.histogram import count_exponents


def quantize(
    x: torch.Tensor,
    table: torch.Tensor,
    row: int,
    format: str,
    storage: str,
    seed: torch.Tensor | None = None,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale, round and store a tensor: codes or carriers in its shape, or the records of a block format.

    ``row`` is a row of the scale table, `AS_STORED` for no scale; in a block format it only salts the ``seed``.
    """
    if is_in_blocks(format):
        return block_codec.stored(x, seed, whole, row, format)
    scaled = _scaled(x, table, row)
    if storage == "simulate":
        return _rounded(scaled, row_of(table[row].tolist()))
    fmt = parse(format)
    return _as_stored(reference_encode(scaled, fmt), fmt, storage)


def _rounded(x: torch.Tensor, row: FormatRow[int]) -> torch.Tensor:
    return reference_round(x, Grid.of_row(row))


def _as_stored(codes: torch.Tensor, fmt: Format, storage: str) -> torch.Tensor:
    dtype = stored_dtype(fmt, storage)
    return codes.view(dtype) if dtype.is_floating_point else codes


def dequantize(
    q: torch.Tensor,
    table: torch.Tensor,
    row: int,
    format: str,
    storage: str,
    dtype: torch.dtype,
    elements: int = 0,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the stored numbers in ``dtype``, divided by the row's scale (a block format has none)."""
    if is_in_blocks(format):
        return block_codec.loaded(q, whole, row, format, elements, dtype)
    fmt = parse(format)
    x = q if storage == "simulate" else reference_decode(q.view(fmt.code_dtype), fmt)
    return (x * 2.0 ** -_scale_exp(table, row)).to(dtype)


def tensor_scale(x: torch.Tensor, format: str) -> torch.Tensor:
    """Return the scale that all blocks of a tensor share, (1,) float32."""
    return block_codec.tensor_scale(x, find_blocks(format))


def keep_nonfinite(rounded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Restore the infs and NaNs of ``x`` that rounding has made finite."""
    fmt = _UNSATURATED.get(rounded.dtype)
    wanted = x.to(rounded.dtype) if fmt is None else reference_encode(x.to(torch.float32), fmt).view(rounded.dtype)
    return torch.where(x.isfinite(), rounded, wanted)


_UNSATURATED = {torch.float8_e4m3fn: E4M3FN_NAN, torch.float8_e5m2: E5M2}  # torch 2.11 casts inf to NaN, 2.13 to 448


def keep_codes(rounded: torch.Tensor, x: torch.Tensor, format: str) -> torch.Tensor:
    """Replace codes by the format's codes for inf and NaN where ``x`` is inf or NaN."""
    inf, nan, sign = kept_codes(parse(format))
    special = torch.where(x.isnan(), nan, inf) + torch.where(x.signbit(), sign, 0)
    return torch.where(x.isfinite(), rounded.to(torch.int32), special).to(rounded.dtype)


def rescale(g: torch.Tensor, table: torch.Tensor, row: int) -> torch.Tensor:
    """Multiply a gradient by the power of two in a row of the table."""
    return _scaled(g, table, row).to(g.dtype)


def observe(grad: torch.Tensor, x: torch.Tensor, tensor: int, format: str, grad_format: str) -> torch.Tensor:
    """Return a copy of the gradient; a calibration step measures here."""
    return grad.clone()


def damage(grad: torch.Tensor, x: torch.Tensor, tensor: int, format: str, grad_format: str) -> torch.Tensor:
    """Return the predicted damage of rounding ``x`` and of rounding ``grad``, (2,) float32.

    |sum other * err| + sqrt(sum other^2 * err^2) with err = rounded - exact. For ``x`` the other factor is its
    gradient; for the gradient it is ``x``, by symmetry of the first-order term. Definitions: docs/algorithms.md,
    "Demotion and promotion".
    """
    pair = (_first_order(x, grad, format), _first_order(grad, x, grad_format))
    return torch.stack(pair).to(torch.float32)


def _first_order(x: torch.Tensor, other: torch.Tensor, fmt: str) -> torch.Tensor:
    error = reference_quantize(x.float(), parse(fmt)).double() - x.double()
    product = other.double() * error
    return product.sum().abs() + product.square().sum().sqrt()


def counts(x: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    """Return the statistics of a cast: overflow, underflow, largest magnitude, moments."""
    entries = table[row].tolist()
    lost = reference_stats(_scaled(x, table, row), Grid.of_row(row_of(entries)))
    amax = float(x.abs().max()) if x.numel() else 0.0
    moments = measured_moments(x) if entries[MEASURE] else UNMEASURED
    carried = entries[CARRIED]
    found = Counts(lost.overflow, lost.underflow, amax, x.numel(), *moments, carried, carried)
    return torch.tensor(found, dtype=torch.float64, device=x.device)


def measured_moments(x: torch.Tensor) -> tuple[float, float, float, float]:
    """Return the non-zero count, the sum of squares, and the sums of ln|x| and ln|x|^2 over non-zero elements."""
    wide = x.detach().double().abs()
    nonzero = wide[wide > 0]
    logs = nonzero.log()
    return nonzero.numel(), float(wide.square().sum()), float(logs.sum()), float(logs.square().sum())


def histogram(x: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    """Count magnitudes by exponent (`count_exponents`), (2 * HISTOGRAM_BINS,) float64.

    On a CPU, return zeros in a step that does not measure.
    """
    if x.device.type == "cpu" and not int(table[row, MEASURE]):
        return x.new_zeros(2 * HISTOGRAM_BINS, dtype=torch.float64)  # on a GPU, reading the flag waits for the device
    return count_exponents(x, parse(format))


def _scale_exp(table: torch.Tensor, row: int) -> int:
    return 0 if row == AS_STORED else int(table[row, 0])


def _scaled(x: torch.Tensor, table: torch.Tensor, row: int) -> torch.Tensor:
    return x.to(torch.float32) * 2.0 ** _scale_exp(table, row)


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of its own, such as a kernel that stores its result leaves."""
    return x.clone()


def side_by_side(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors along their last dimension."""
    return torch.cat(list(pieces), -1)


def ln(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm."""
    return torch.log(x)


def generator_of(seed: torch.Tensor) -> torch.Generator:
    """Return a generator that draws the same numbers for the same seed."""
    return torch.Generator(seed.device).manual_seed(int(seed.sum()))


def draw(size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers, uniform in [0, 1), the same for the same seed."""
    return torch.rand(size, generator=generator_of(seed), device=seed.device, dtype=torch.float32)


Quantize.implement(quantize)
Draw.implement(draw)
Dequantize.implement(dequantize)
TensorScale.implement(tensor_scale)
Rotate.implement(hadamard.rotated)
CorrectScales.implement(eden.corrected)
KeepNonfinite.implement(keep_nonfinite)
KeepCodes.implement(keep_codes)
Rescale.implement(rescale)
Observe.implement(observe)
Damage.implement(damage)
Count.implement(counts)
Histogram.implement(histogram)
InMemory.implement(in_memory)
PackBits.implement(bits.packed)
UnpackBits.implement(bits.unpacked)
SideBySide.implement(side_by_side)
Ln.implement(ln)
