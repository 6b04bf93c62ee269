"""Symbolic operators that passes insert and lowering expands: casts, counts, scales. See `docs/architecture.md`.

``quantize(x, table, row, format, storage) -> q``
    Round ``x * 2**table[row, 0]`` to ``format`` and store it. The row is the site's id; where a site is stored in
    several places, the later ones have rows of their own.
``dequantize(q, table, row, format, storage, dtype) -> x``
    Read ``q`` back as ``dtype``, multiplied by ``2**-table[row, 0]``; row ``AS_STORED`` leaves it as it is.
``keep_nonfinite(rounded, x) -> y``
    ``rounded`` where ``x`` is finite, else ``x``: inf and NaN of a gradient survive formats that have none.
``keep_codes(rounded, x, format) -> y``
    The same of integer codes: inf and NaN become the format's codes of them, inf that of NaN where it has no other.
``counts(x, table, row, format) -> (10,) float64``
    Counts of what rounding ``x`` for the row does, and its moments (`numerics.stats.Counts`); lowering adds one per
    watched quantize.
``histogram(x, table, row, format) -> (128,) float64``
    Counts by exponent: how many elements under- and overflow at any scale (`fxprec.runtime.scaling.histogram`).
``rescale(g, table, row) -> g``
    Multiply by ``2**table[row, 0]``; exact, since the factor is a power of two.
``in_memory(x) -> x``
    ``x`` in memory of its own, where a compiler would lay it into a larger tensor's, or keep that one for it.
``side_by_side(pieces) -> x``
    The pieces joined along the last dimension, each written by the kernel that makes it.
``observe(grad, x, tensor, format, grad_format) -> grad``
    Identity on the gradient of ``x``; marks where policy ``exact`` measures, with ``damage``, what rounding the
    counted tensor ``x`` and its gradient would cost.

Passes see the declarations (`fxprec.ir.calls`) and the fake implementations here; `fxprec.runtime.reference_ops`
registers the real ones, so a graph runs at every stage of compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, Tensors
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.stats import CARRIED as CARRIED
from fxprec.numerics.stats import WIDTH

Storage = Literal["native", "packed", "simulate"]
AS_STORED = -1
# Columns of the table: those of `FormatRow`, the scale exponent first, then `CARRIED` and these.
MEASURE = CARRIED + 1  # 1 in steps that measure moments and histograms
TABLE_COLUMNS = MEASURE + 1

HISTOGRAM_BINS = 64


def stored_dtype(fmt: Format, storage: str) -> torch.dtype:
    """Return the dtype a tensor of format ``fmt`` has in memory.

    ``native`` uses the hardware dtype of the same bits, ``packed`` the native dtype of a 16-bit format that has
    one (same bits, no codec) and integer codes otherwise, ``simulate`` float32 carriers.
    """
    if storage == "simulate":
        return torch.float32
    native = fmt.torch_dtype
    if native is not None and (storage == "native" or fmt.bits > 8):
        return native
    assert storage == "packed", f"{fmt.name} has no native dtype"  # Config refuses this combination
    return fmt.code_dtype


@dataclass(frozen=True)
class Stored(Call):
    x: Node
    table: Node
    row: int
    format: str
    storage: str

    @property
    def is_simulated(self) -> bool:
        """What is stored is a float32 carrier, and the table's row the format."""
        return self.storage == "simulate"


@dataclass(frozen=True)
class Quantize(Stored, op="quantize"):
    pass


@Quantize.fake
def _(x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str) -> torch.Tensor:
    return torch.empty_like(x, dtype=stored_dtype(parse(format), storage))


@dataclass(frozen=True)
class Dequantize(Call, op="dequantize"):
    q: Node
    table: Node
    row: int
    format: str
    storage: str
    dtype: torch.dtype

    @property
    def is_simulated(self) -> bool:
        """What is read is a float32 carrier."""
        return self.storage == "simulate"

    @property
    def is_as_stored(self) -> bool:
        """The scale stays on."""
        return self.row == AS_STORED


@Dequantize.fake
def _(q: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(q, dtype=dtype)


@dataclass(frozen=True)
class KeepNonfinite(Call, op="keep_nonfinite"):
    rounded: Node
    x: Node


@KeepNonfinite.fake
def _(rounded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rounded)


@dataclass(frozen=True)
class KeepCodes(Call, op="keep_codes"):
    rounded: Node
    x: Node
    format: str


@KeepCodes.fake
def _(rounded: torch.Tensor, x: torch.Tensor, format: str) -> torch.Tensor:
    return torch.empty_like(rounded)


@dataclass(frozen=True)
class _Counted(Call):
    x: Node
    table: Node
    row: int
    format: str


@dataclass(frozen=True)
class Count(_Counted, op="counts"):
    pass


@Count.fake
def _(x: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    return x.new_empty(WIDTH, dtype=torch.float64)


@dataclass(frozen=True)
class Histogram(_Counted, op="histogram"):
    pass


@Histogram.fake
def _(x: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    return x.new_empty(2 * HISTOGRAM_BINS, dtype=torch.float64)


@dataclass(frozen=True)
class Rescale(Call, op="rescale"):
    g: Node
    table: Node
    row: int


@Rescale.fake
def _(g: torch.Tensor, table: torch.Tensor, row: int) -> torch.Tensor:
    return torch.empty_like(g)


@dataclass(frozen=True)
class InMemory(Call, op="in_memory"):
    x: Node


@InMemory.fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class SideBySide(Call, op="side_by_side"):
    pieces: Tensors


@SideBySide.fake
def _(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(pieces), -1)


@dataclass(frozen=True)
class _Observed(Call):
    grad: Node
    x: Node
    tensor: int
    format: str
    grad_format: str


@dataclass(frozen=True)
class Observe(_Observed, op="observe"):
    pass


@Observe.fake
def _(grad: torch.Tensor, x: torch.Tensor, tensor: int, format: str, grad_format: str) -> torch.Tensor:
    return torch.empty_like(grad)


@dataclass(frozen=True)
class Damage(_Observed, op="damage"):
    pass


@Damage.fake
def _(grad: torch.Tensor, x: torch.Tensor, tensor: int, format: str, grad_format: str) -> torch.Tensor:
    return grad.new_empty(2, dtype=torch.float32)


QUANTIZE = Quantize.target
DEQUANTIZE = Dequantize.target
KEEP_NONFINITE = KeepNonfinite.target
KEEP_CODES = KeepCodes.target
COUNTS = Count.target
RESCALE = Rescale.target
OBSERVE = Observe.target
