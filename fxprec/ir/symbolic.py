"""The whole IR extension: symbolic ops that passes insert and lowering expands.

``quantize(x, table, row, format, storage) -> q``
    Round ``x * 2**table[row, 0]`` to ``format`` and store it. The row is the site's id; where a site is stored in
    several places, the later ones have rows of their own.
``dequantize(q, table, row, format, storage, dtype) -> x``
    Read ``q`` back as ``dtype``, multiplied by ``2**-table[row, 0]``; row ``AS_STORED`` leaves it as it is.
``keep_nonfinite(rounded, x) -> y``
    ``rounded`` where ``x`` is finite, else ``x``: inf and NaN of a gradient survive formats that have none.
``counts(x, table, row, format) -> (10,) float64``
    Counts of what rounding ``x`` for the row does, and its moments (`numerics.stats.Counts`); lowering adds one per
    watched quantize.
``histogram(x, table, row, format) -> (128,) float64``
    Counts by exponent: how many elements under- and overflow at any scale (`fxprec.runtime.scaling.histogram`).
``rescale(g, table, row) -> g``
    Multiply by ``2**table[row, 0]``; exact, since the factor is a power of two.
``observe(grad, x, tensor, format, grad_format) -> grad``
    Identity on the gradient of ``x``; marks where policy ``exact`` measures, with ``damage``, what rounding the
    counted tensor ``x`` and its gradient would cost.

``matmul(a, b, *sums)``, ``convolution(x, weight, ..., *sums)``, ``convolution_backward(grad, x, weight, ..., *sums)``
    A GEMM whose products and partial sums are rounded to formats of their own, for option ``accumulator``.

On CPU, lowering turns them into three kernels: ``store`` (codes, rounded values, counts), ``round`` (the same
without codes) and ``load``; ``store_`` and ``round_`` write the rounded values over ``x``. The values come at the scale
they were stored with; ``keep`` keeps inf and NaN there.

Passes see the schemas and the fake implementations here; `fxprec.runtime.reference_ops` registers the real
ones, so a graph runs at every stage of compilation.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from fxprec.numerics.formats import Format, parse
from fxprec.numerics.rows import FormatRow
from fxprec.numerics.stats import WIDTH

Storage = Literal["native", "packed", "simulate"]
AS_STORED = -1
# Columns of the table: those of `FormatRow`, the scale exponent first, then these.
CARRIED = len(FormatRow._fields)  # the scale exponent that what comes into the row's quantize carries already
MEASURE = CARRIED + 1  # 1 in steps that measure moments and histograms
TABLE_COLUMNS = MEASURE + 1

HISTOGRAM_BINS = 64

_library = torch.library.Library("fxprec", "DEF")
_library.define("quantize(Tensor x, Tensor table, int row, str format, str storage) -> Tensor")
_library.define("dequantize(Tensor q, Tensor table, int row, str format, str storage, ScalarType dtype) -> Tensor")
_library.define("keep_nonfinite(Tensor rounded, Tensor x) -> Tensor")
_library.define("counts(Tensor x, Tensor table, int row, str format) -> Tensor")
_library.define("histogram(Tensor x, Tensor table, int row, str format) -> Tensor")
_library.define("rescale(Tensor g, Tensor table, int row) -> Tensor")
_library.define("observe(Tensor grad, Tensor x, int tensor, str format, str grad_format) -> Tensor")
_library.define("damage(Tensor grad, Tensor x, int tensor, str format, str grad_format) -> Tensor")
_CPU_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
_library.define(
    "store(Tensor x, Tensor table, int row, str format, str storage, bool value, bool keep)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_CPU_TAGS,
)
_library.define(
    "round(Tensor x, Tensor table, int row, str format, str storage, bool keep) -> (Tensor, Tensor)", tags=_CPU_TAGS
)
_library.define(
    "store_(Tensor(a!) x, Tensor table, int row, str format, str storage, bool keep) -> (Tensor, Tensor)",
    tags=_CPU_TAGS,
)
_library.define(
    "round_(Tensor(a!) x, Tensor table, int row, str format, str storage, bool keep) -> Tensor", tags=_CPU_TAGS
)
_library.define("load(Tensor q, Tensor table, int row, str format) -> Tensor", tags=_CPU_TAGS)

_SUMS = "str products, str sums, bool kahan, int chunk"
_WINDOW = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_library.define(f"matmul(Tensor a, Tensor b, {_SUMS}) -> Tensor")
_library.define(f"convolution(Tensor x, Tensor weight, {_WINDOW}, bool channels_last, {_SUMS}) -> Tensor")
_library.define(
    f"convolution_backward(Tensor grad, Tensor x, Tensor weight, {_WINDOW}, bool channels_last, bool[] mask, {_SUMS})"
    " -> (Tensor, Tensor)"
)

QUANTIZE = torch.ops.fxprec.quantize.default
DEQUANTIZE = torch.ops.fxprec.dequantize.default
KEEP_NONFINITE = torch.ops.fxprec.keep_nonfinite.default
HISTOGRAM = torch.ops.fxprec.histogram.default
COUNTS = torch.ops.fxprec.counts.default
RESCALE = torch.ops.fxprec.rescale.default
STORE = torch.ops.fxprec.store.default
ROUND = torch.ops.fxprec.round.default
STORE_ = torch.ops.fxprec.store_.default
ROUND_ = torch.ops.fxprec.round_.default
LOAD = torch.ops.fxprec.load.default
MATMUL = torch.ops.fxprec.matmul.default
CONVOLUTION = torch.ops.fxprec.convolution.default
CONVOLUTION_BACKWARD = torch.ops.fxprec.convolution_backward.default
OBSERVE = torch.ops.fxprec.observe.default
DAMAGE = torch.ops.fxprec.damage.default


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


@torch.library.register_fake("fxprec::quantize")
def _(x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str) -> torch.Tensor:
    return torch.empty_like(x, dtype=stored_dtype(parse(format), storage))


@torch.library.register_fake("fxprec::dequantize")
def _(q: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(q, dtype=dtype)


@torch.library.register_fake("fxprec::counts")
def _(x: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    return x.new_empty(WIDTH, dtype=torch.float64)


@torch.library.register_fake("fxprec::keep_nonfinite")
def _(rounded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rounded)


@torch.library.register_fake("fxprec::histogram")
def _(x: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    return x.new_empty(2 * HISTOGRAM_BINS, dtype=torch.float64)


@torch.library.register_fake("fxprec::rescale")
def _(g: torch.Tensor, table: torch.Tensor, row: int) -> torch.Tensor:
    return torch.empty_like(g)


@torch.library.register_fake("fxprec::observe")
def _(grad: torch.Tensor, x: torch.Tensor, tensor: int, format: str, grad_format: str) -> torch.Tensor:
    return torch.empty_like(grad)


@torch.library.register_fake("fxprec::damage")
def _(grad: torch.Tensor, x: torch.Tensor, tensor: int, format: str, grad_format: str) -> torch.Tensor:
    return grad.new_empty(2, dtype=torch.float32)


@torch.library.register_fake("fxprec::store")
def _(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, value: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.empty_like(x, dtype=stored_dtype(parse(format), storage))
    values = torch.empty_like(x, dtype=torch.float32) if value else x.new_empty(0, dtype=torch.float32)
    return codes, values, x.new_empty(WIDTH, dtype=torch.float64)


@torch.library.register_fake("fxprec::round")
def _(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.float32), x.new_empty(WIDTH, dtype=torch.float64)


@torch.library.register_fake("fxprec::store_")
def _(
    x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty_like(x, dtype=stored_dtype(parse(format), storage))
    return codes, x.new_empty(WIDTH, dtype=torch.float64)


@torch.library.register_fake("fxprec::round_")
def _(x: torch.Tensor, table: torch.Tensor, row: int, format: str, storage: str, keep: bool) -> torch.Tensor:
    return x.new_empty(WIDTH, dtype=torch.float64)


@torch.library.register_fake("fxprec::load")
def _(q: torch.Tensor, table: torch.Tensor, row: int, format: str) -> torch.Tensor:
    return torch.empty_like(q, dtype=torch.float32)


@torch.library.register_fake("fxprec::matmul")
def _(a: torch.Tensor, b: torch.Tensor, *sums: object) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)


@torch.library.register_fake("fxprec::convolution")
def _(x: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    *window, channels_last = options[:7]
    shape = torch.ops.aten.convolution(x, weight, None, *window).shape
    return _in_layout(x.new_empty(shape, dtype=torch.float32), channels_last)


@torch.library.register_fake("fxprec::convolution_backward")
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    channels_last, mask = options[6:8]
    wanted = (t if asked else t.new_empty(0) for t, asked in zip((x, weight), mask, strict=True))
    first, second = (_in_layout(t.new_empty(t.shape, dtype=torch.float32), channels_last) for t in wanted)
    return first, second


def _in_layout(t: torch.Tensor, channels_last: bool) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if channels_last and t.dim() == 4 else t
