"""Scale, encode and sum one bucket, by the fast kernels where they apply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxprec.runtime.aps import kernels
from fxprec.runtime.aps.exponents import power_of_two
from fxprec.runtime.aps.kernels import MAX_FACTOR_EXPONENT
from fxprec.runtime.aps.segments import Bounds, scale_by_powers
from fxprec.runtime.aps.wire import Wire


@dataclass(frozen=True)
class Coder:
    """A wire with the rounding of one bucket and step."""

    wire: Wire
    generator: torch.Generator | None
    """Generator of stochastic rounding; None rounds to nearest."""
    bounded: bool
    """Whether magnitudes are at most 2^top, as APS scales them."""

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes of scaled values."""
        return self.wire.encode(values, generator=self.generator, bounded=self.bounded)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of bytes."""
        return self.wire.decode(codes, bounded=self.bounded)

    def round(self, values: Tensor) -> Tensor:
        """Return values rounded to the wire format, stochastically with a generator; overflow follows the format."""
        if self.generator is not None:
            return self.wire.decode(self.wire.encode(values, generator=self.generator))
        return self.values_of(self.codes_of(values))

    def codes_of(self, values: Tensor) -> Tensor:
        """Return the bytes of unscaled values, rounded to nearest, with the format's own rule on overflow."""
        if not self._fast(values):
            return self.wire.encode(values)
        codes = torch.empty(values.numel(), dtype=torch.uint8, device="cpu")
        kernels.encode(values, 0, self.wire.kind, codes)
        return codes

    def values_of(self, codes: Tensor) -> Tensor:
        """Return the values of bytes, including overflow codes."""
        if not self._fast(codes):
            return self.wire.decode(codes)
        values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
        kernels.look_up(codes, self._table(), values)
        return values

    def scale_and_encode(self, values: Tensor, bounds: Bounds, exponents: Tensor) -> Tensor:
        """Multiply each piece of values (n,) by 2^exponent and return the bytes; may scale `values` in place."""
        if self.generator is not None or not self._fast(values):
            scale_by_powers(values, bounds, exponents)
            return self.encode(values)
        codes = torch.empty(values.numel(), dtype=torch.uint8, device="cpu")
        covered = 0
        for (start, end), exponent in zip(bounds, exponents.tolist(), strict=True):
            kernels.encode(values[start:end], exponent, self.wire.kind, codes[start:end])
            covered = end
        codes[covered:] = 0  # padding, whose decoded values reach no gradient
        return codes

    def sum(self, rows: Tensor) -> Tensor:
        """Return the float32 sum, in order, of coded rows (rows, n * code_bytes)."""
        if self._fast(rows):
            return kernels.sum_rows(rows, self._table())
        total = self.decode(rows[0])
        for row in rows[1:]:
            total += self.decode(row)
        return total

    def decode_scaled(
        self, codes: Tensor, bounds: Bounds, exponents: Tensor, mask: Tensor, divisor: int, out: Tensor | None = None
    ) -> Tensor:
        """Return decoded values, each piece times 2^exponent and `mask`, over `divisor`; in `out` (n,) if given."""
        count = bounds[-1][1] if bounds else 0
        if self._fast(codes) and (out is None or kernels.usable(out)):
            values = torch.empty(count, dtype=torch.float32, device="cpu") if out is None else out
            tables = _scaled_tables(self._table(), exponents, mask, divisor)
            for (start, end), table in zip(bounds, tables.unbind(), strict=True):
                kernels.look_up(codes[start:end], table, values[start:end])
            return values
        values = self.decode(codes)[:count]
        scale_by_powers(values, bounds, exponents, mask)
        torch.div(values, divisor, out=values)
        return values if out is None else out.copy_(values)

    def _fast(self, tensor: Tensor) -> bool:
        return self.wire.block == self.wire.code_bytes == 1 and kernels.usable(tensor)

    def _table(self) -> Tensor:
        return self.wire.decode(torch.arange(256, dtype=torch.uint8, device="cpu"))


def _scaled_tables(table: Tensor, exponents: Tensor, mask: Tensor, divisor: int) -> Tensor:
    """Return the table's 256 values as each piece decodes them (pieces, 256), by the same operations as on values."""
    first = exponents.clamp(-MAX_FACTOR_EXPONENT, MAX_FACTOR_EXPONENT)
    scaled = table * (power_of_two(first) * mask)[:, None] * power_of_two(exponents - first)[:, None]
    return scaled / divisor
