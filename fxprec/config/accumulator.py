"""The accumulator of GEMMs in a simulated run: option ``accumulator``."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.config import checks
from fxprec.errors import ConfigError
from fxprec.numerics.formats import FP32, Format, parse


@dataclass(frozen=True, kw_only=True)
class Accumulator(checks.Options):
    """The formats that every GEMM, forward and backward, rounds partial sums and products to.

    Source: Han et al. 2020, section 5. A format is a `Format` or its name. Raises `ConfigError` for a wrong value.
    """

    format: Format
    """Format of each partial sum; products are added in increasing k."""
    products: Format = FP32
    """Format of each product; float32 represents products of 8-bit formats exactly."""
    kahan: bool = False
    """Whether sums use Kahan's compensation, in the same format."""
    chunk: int | None = None
    """Products per partial sum before the sums are added, at least 1 (Wang et al. 2018 use 64); None: all."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("format", "products"):
            put(self, name, _format(name, getattr(self, name)))
        put(self, "kahan", checks.boolean("accumulator.kahan", self.kahan))
        if self.chunk is not None:
            put(self, "chunk", checks.integer("accumulator.chunk", self.chunk, least=1))

    def describe(self) -> str:
        """Return a text such as ``"1-6-9, in chunks of 64"``."""
        chunks = f", in chunks of {self.chunk}" if self.chunk else ""
        return self.format.name + (", with Kahan's compensation" if self.kahan else "") + chunks


def find_accumulator(value: object) -> Accumulator | None:
    """Return the option ``accumulator`` in canonical form: None, or an `Accumulator`. Raises `ConfigError`."""
    if value is None or isinstance(value, Accumulator):
        return value
    return Accumulator(format=_format("format", value))


def _format(name: str, value: object) -> Format:
    field = "accumulator" if name == "format" else f"accumulator.{name}"
    found = checks.format_of(field, value, Format, parse, "a fxprec.Format, its name, or a fxprec.Accumulator")
    if found.mantissa_bits == 22:
        raise ConfigError(
            f"{field} is {found.name}, which has one mantissa bit less than float32: sums are computed in float32 and "
            "would be rounded twice; use at most 21 mantissa bits, or 'fp32'"
        )
    return found
