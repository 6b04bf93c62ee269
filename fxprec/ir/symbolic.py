"""Symbolic operators that passes insert and lowering expands: casts, counts, scales. See `docs/architecture.md`.

Passes see the declarations (`fxprec.ir.calls`) and the fake implementations here. `fxprec.runtime.reference_ops`
registers the real implementations, so a graph runs at every stage of compilation. Lowering replaces the operators by
ATen's, or by kernels (`fxprec.kernels`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.fx import Node

from fxprec.ir.calls import Call, FakeCall, Size, Sizes
from fxprec.numerics.bits import packed_shape
from fxprec.numerics.blocks import BlockFormat, find
from fxprec.numerics.formats import Format
from fxprec.numerics.stats import CARRIED as CARRIED
from fxprec.numerics.stats import MEASURE as MEASURE
from fxprec.numerics.stats import WIDTH

Storage = Literal["native", "packed", "simulate"]
AS_STORED = -1
TABLE_COLUMNS = MEASURE + 1
"""Columns of the scale table: `FormatRow`'s (the scale exponent first), then `CARRIED` and `MEASURE`."""

HISTOGRAM_BINS = 64


def stored_dtype(fmt: Format, storage: str) -> torch.dtype:
    """Return the dtype a tensor of format ``fmt`` has in memory.

    ``native`` uses the hardware dtype of the same bits. ``packed`` uses the native dtype of a 16-bit format that has
    one (same bits, no codec), and otherwise integer codes. ``simulate`` uses float32 carriers.
    """
    if storage == "simulate":
        return torch.float32
    native = fmt.torch_dtype
    if native is not None and (storage == "native" or fmt.bits > 8):
        return native
    assert storage == "packed", f"{fmt.name} has no native dtype"  # Config refuses this combination
    return fmt.code_dtype


def is_in_blocks(stored: Node | str) -> bool:
    """Return whether a format is a block format, or whether a node is a cast to or from one."""
    if isinstance(stored, str):
        return isinstance(find(stored), BlockFormat)
    cast = Quantize.match(stored) or Dequantize.match(stored)
    return cast is not None and is_in_blocks(cast.format)


class Stored(Call):
    """A cast to the format of a row of the table: the fields that all casts have."""

    x: Node
    table: Node
    row: int
    format: str
    storage: str

    @property
    def is_simulated(self) -> bool:
        """Whether a float32 carrier is stored, whose format is read from the table's row."""
        return self.storage == "simulate"


def codes_like(x: torch.Tensor, format: str, storage: str) -> torch.Tensor:
    """Return the uninitialised tensor in which ``x`` is stored."""
    fmt = find(format)
    if isinstance(fmt, BlockFormat):
        blocks = (x.numel() + fmt.block - 1) // fmt.block
        return x.new_empty((blocks, fmt.head_bytes + fmt.code_bytes), dtype=torch.uint8)
    return torch.empty_like(x, dtype=stored_dtype(fmt, storage))


class Quantize(Stored, op="quantize", fake=lambda call: codes_like(call.x, call.format, call.storage)):
    """Round ``x * 2**table[row, 0]`` to a format, and store the codes or carriers.

    The row is the site's id. If a site is stored in several places, the later places have rows of their own.

    A block format (`fxprec.numerics.blocks`) has its own scales and reads no table. It encodes the elements of ``x`` in
    row-major order as (blocks, bytes) uint8: a block's scale, offset and codes. With ``seed`` (1,) int32 it rounds
    stochastically, differently for each row; None rounds to nearest. A GEMM's operand in blocks belongs to no site, so
    its row is below ``AS_STORED``. ``whole`` is the tensor's scale, for formats that have one.
    """

    seed: Node | None = None
    whole: Node | None = None


def _decoded(call: FakeCall) -> object:
    if is_in_blocks(call.format):
        return call.q.new_empty(call.elements, dtype=call.dtype)
    return torch.empty_like(call.q, dtype=call.dtype)


class Dequantize(Call, op="dequantize", fake=_decoded):
    """Read ``q`` back as ``dtype``, multiplied by ``2**-table[row, 0]``; row ``AS_STORED`` leaves the scale on.

    For a block format, decode the first ``elements``, as (elements,).
    """

    reads_copy = True

    q: Node
    table: Node
    row: int
    format: str
    storage: str
    dtype: torch.dtype
    elements: Size = 0
    whole: Node | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether a float32 carrier is read."""
        return self.storage == "simulate"

    @property
    def is_as_stored(self) -> bool:
        """Whether the scale stays on."""
        return self.row == AS_STORED


class TensorScale(Call, op="tensor_scale", fake=lambda call: call.x.new_empty(1, dtype=torch.float32)):
    """Compute the float32 (1,) that multiplies the scales of a tensor's blocks."""

    x: Node
    format: str


class Rotate(Call, op="rotate", fake=lambda call: call.x.new_empty(call.x.shape, dtype=torch.float32)):
    """Multiply each ``size`` elements of the last dimension by a random Hadamard matrix; the result is float32.

    The same ``seed`` (1,) int32 gives the same matrix, which cancels in the product of two operands rotated by it
    (`fxprec.numerics.hadamard`).
    """

    x: Node
    seed: Node
    size: int = 16


class CorrectScales(Call, op="correct_scales", fake=lambda call: torch.empty_like(call.q)):
    """Correct the scales of the blocks ``q`` that a rotated ``x`` was rounded to, by MS-EDEN (`fxprec.numerics.eden`).

    Afterwards each group of ``size`` elements is unbiased.
    """

    q: Node
    x: Node
    whole: Node | None
    seed: Node
    row: int
    format: str
    size: int


class KeepNonfinite(Call, op="keep_nonfinite", fake=lambda call: torch.empty_like(call.rounded)):
    """Return ``rounded`` where ``x`` is finite, else ``x``: a gradient's inf and NaN survive formats that have none."""

    rounded: Node
    x: Node


class KeepCodes(Call, op="keep_codes", fake=lambda call: torch.empty_like(call.rounded)):
    """Put the codes of inf and NaN into a gradient's rounded codes; inf gets NaN's, unless overflow is inf."""

    rounded: Node
    x: Node
    format: str


class _Counted(Call):
    x: Node
    table: Node
    row: int
    format: str


def counts_like(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised row of counts."""
    return x.new_empty(WIDTH, dtype=torch.float64)


class Count(_Counted, op="counts", fake=lambda call: counts_like(call.x)):
    """Count what rounding ``x`` for the row loses, and its moments: `numerics.stats.Counts`, (10,) float64.

    Lowering adds one for each watched `Quantize`.
    """


class Histogram(_Counted, op="histogram", fake=lambda call: call.x.new_empty(2 * HISTOGRAM_BINS, dtype=torch.float64)):
    """Count a tensor's elements by exponent, (128,) float64, which gives over- and underflow at any scale.

    `fxprec.runtime.scaling.histogram` reads the counts.
    """


class Rescale(Call, op="rescale", fake=lambda call: torch.empty_like(call.g)):
    """Multiply a gradient by ``2**table[row, 0]``; exact, since the factor is a power of two."""

    g: Node
    table: Node
    row: int


class PackBits(Call, op="pack_bits", fake=lambda call: call.x.new_empty(packed_shape(call.x.shape), dtype=torch.uint8)):
    """Pack booleans into bytes, one bit each (`fxprec.numerics.bits`); ``x`` is in memory order."""

    x: Node


class UnpackBits(Call, op="unpack_bits", fake=lambda call: call.q.new_empty(call.shape, dtype=torch.bool)):
    """Return the booleans of ``shape`` that `PackBits` packed."""

    reads_copy = True

    q: Node
    shape: Sizes


class Draw(Call, op="draw", fake=lambda call: call.seed.new_empty(call.size, dtype=torch.float32)):
    """Draw uniform numbers, those of Inductor's ``inductor_random``, in the loop that reads them."""

    size: Sizes
    seed: Node


class InMemory(Call, op="in_memory", fake=lambda call: torch.empty_like(call.x)):
    """Copy a tensor into its own buffer.

    Otherwise a compiler could place ``x`` in a larger tensor's buffer, or keep that buffer for it.
    """

    x: Node


class Product(Call):
    """Multiply the numbers of codes ``a`` (M, K) and ``b`` (K, N), add ``bias``, and round to ``dtype``.

    Each number is divided by ``2**table[row, 0]`` (row ``AS_STORED``: not divided). Sums are float32. All GEMMs over
    codes have these fields.
    """

    a: Node
    b: Node
    bias: Node | None
    table: Node
    row_a: int
    row_b: int
    format_a: str
    format_b: str
    dtype: torch.dtype

    @property
    def formats(self) -> tuple[str, str]:
        """Return the formats of both operands."""
        return self.format_a, self.format_b


def product_like(call: FakeCall, dtype: torch.dtype | None = None) -> object:
    """Return an uninitialised tensor for the product that a call computes."""
    return call.a.new_empty(call.a.shape[0], call.b.shape[1], dtype=dtype or call.dtype)


class CodedGemm(Product, op="gemm", fake=product_like):
    """Multiply codes, on tensor cores or in a generated kernel.

    ``kernel`` is ``native`` (``torch._scaled_mm``: ``a`` row-major, ``b`` column-major) or ``generated`` (any layout).
    """

    kernel: str
    fast: bool
    """Whether tensor cores may accumulate in fewer bits than float32 (``use_fast_accum`` of `torch._scaled_mm`)."""


def transposed_like(q: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor for a transposed copy."""
    return q.new_empty(q.shape[-1], q.numel() // q.shape[-1])


class Transposed(Call, op="transposed", fake=lambda call: transposed_like(call.q)):
    """Transpose codes (..., N) as a contiguous matrix (N, rest): the copy that a native GEMM over the rows reads."""

    q: Node


class _Observed(Call):
    grad: Node
    x: Node
    tensor: int
    format: str
    grad_format: str


class Observe(_Observed, op="observe", fake=lambda call: torch.empty_like(call.grad)):
    """Return the gradient of ``x`` unchanged, and mark where policy ``exact`` measures.

    `Damage` measures the cost of rounding the counted tensor ``x`` and its gradient.
    """


class Damage(_Observed, op="damage", fake=lambda call: call.grad.new_empty(2, dtype=torch.float32)):
    """Measure the cost of rounding a tensor and its gradient: two float32."""


QUANTIZE = Quantize.target
DEQUANTIZE = Dequantize.target
TENSOR_SCALE = TensorScale.target
PACK_BITS = PackBits.target
UNPACK_BITS = UnpackBits.target
KEEP_NONFINITE = KeepNonfinite.target
KEEP_CODES = KeepCodes.target
RESCALE = Rescale.target
GEMM = CodedGemm.target
TRANSPOSED = Transposed.target
