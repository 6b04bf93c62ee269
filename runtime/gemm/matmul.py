"""Multiply stored operands in a Triton GEMM that decodes codes as it loads them and can encode the result.

Operands are codes of any format of at most 16 bits, or plain floats. Both are converted to the narrowest dtype that
holds their numbers exactly, so products are exact. Sums are float32, in steps of the tile's depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxprec import compat
from fxprec.ir import symbolic
from fxprec.numerics import device
from fxprec.numerics.formats import BF16, FP16, FP32, Format
from fxprec.numerics.rows import format_row, thresholds
from fxprec.numerics.stats import SITE_COUNTERS, device_function
from fxprec.runtime.gemm import tuning
from fxprec.runtime.gemm.launch import enqueue, is_noting, note_alternatives
from fxprec.runtime.gemm.tiles import SMALL, TILES, Tile

_GROUP = 8  # rows of tiles that share columns of B in the L2 cache
TF32_MANTISSA = 10
INTERPRETED = tl.constexpr(compat.triton_interprets())
as_bfloat16, power = device.bfloat16(), device.power()
largest_bits, count_lost, note_facts = map(device_function, ("largest_bits", "count_lost", "note_facts"))


@triton.jit
def _read(at: tl.tensor, inside: tl.tensor, DECODE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Load a tile of an operand in the dtype of the tensor cores; zeros outside of the matrix."""
    value = tl.load(at, mask=inside, other=0.0 if DECODE is None else 0)
    if DECODE is not None:
        value = DECODE(value.to(tl.int32))
    return value.to(DTYPE)


@triton.jit
def _nearest(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round float32 to the nearest ``DTYPE``, as hardware does. Triton's interpreter truncates to bfloat16."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        x = tl.where(x == x, as_bfloat16(x), x)
    return x.to(DTYPE)


@triton.jit(do_not_specialize_on_alignment=["exp_a_ptr", "exp_b_ptr", "row_ptr"])
def matmul_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    exp_a_ptr: tl.tensor,
    exp_b_ptr: tl.tensor,
    row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride_am: tl.tensor,
    stride_ak: tl.tensor,
    stride_bk: tl.tensor,
    stride_bn: tl.tensor,
    bucket: tl.tensor,
    DECODE_A: tl.constexpr,
    DECODE_B: tl.constexpr,
    ENCODE: tl.constexpr,
    LIMITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    MIDDLE: tl.constexpr,
    SCALED_A: tl.constexpr,
    SCALED_B: tl.constexpr,
    BIAS: tl.constexpr,
    STATS: tl.constexpr,
    CARRIED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Compute one tile of the product; see `matmul`."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    first = program // (GROUP * tiles_n) * GROUP
    tall = tl.minimum(tiles_m - first, GROUP)
    i = (first + program % (GROUP * tiles_n) % tall) * ROWS + tl.arange(0, ROWS)
    j = (program % (GROUP * tiles_n)) // tall * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, DEPTH)
    a_at = a_ptr + i[:, None].to(tl.int64) * stride_am + d[None, :] * stride_ak
    b_at = b_ptr + d[:, None] * stride_bk + j[None, :].to(tl.int64) * stride_bn
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, k, DEPTH):
        left = k - start
        a = _read(a_at, (i[:, None] < m) & (d[None, :] < left), DECODE_A, DTYPE)
        b = _read(b_at, (d[:, None] < left) & (j[None, :] < n), DECODE_B, DTYPE)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_at += DEPTH * stride_ak
        b_at += DEPTH * stride_bk
    if SCALED_A:
        total = total * power(-tl.load(exp_a_ptr))
    if SCALED_B:
        total = total * power(-tl.load(exp_b_ptr))
    if BIAS:
        total = total + tl.load(bias_ptr + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    inside = (i[:, None] < m) & (j[None, :] < n)
    at = out_ptr + i[:, None].to(tl.int64) * n + j[None, :]
    if ENCODE is None:
        tl.store(at, _nearest(total, out_ptr.dtype.element_ty), mask=inside)
    else:
        total = _nearest(total, MIDDLE).to(tl.float32)  # as a GEMM with this result dtype rounds
        if STATS:
            largest = largest_bits(total, inside)  # first, so that ``total`` leaves its registers
        factor = power(tl.load(row_ptr))
        stored = total * factor
        if STATS:
            if program == 0:
                note_facts(counts_ptr, tl.cast(m, tl.int64) * n, tl.load(row_ptr + CARRIED), tl.load(row_ptr), 0)
            # Moments would spill registers.
            count_lost(largest, stored, inside, factor, counts_ptr, LIMITS[0], LIMITS[1])
        tl.store(at, ENCODE(stored).to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Operand:
    """A stored matrix in any layout. ``value = decode(codes, fmt) * 2**-exponent``."""

    codes: Tensor
    """(M, K) or (K, N): unsigned codes of ``fmt``, or plain floats."""
    fmt: Format | None = None
    """None for plain floats."""
    exponent: Tensor | None = None
    """0-dim int32, or None for no scale."""


@dataclass(frozen=True)
class Output:
    """The codes that a product is stored as: ``encode(product * 2**row[0], fmt)``."""

    fmt: Format
    row: Tensor
    """The result's row of the scale table, int32."""
    keep: bool = False
    stats: bool = True


_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dot_dtype(a: Format, b: Format) -> tuple[torch.dtype, str]:
    """Return the dtype in which tensor cores multiply ``a`` and ``b`` exactly, and Triton's ``input_precision``.

    The dtype is bfloat16 or float16 if one of them contains both formats, else float32, as tf32 if 10 mantissa bits are
    enough.
    """
    for dtype, carrier in ((torch.bfloat16, BF16), (torch.float16, FP16)):
        if carrier.contains(a) and carrier.contains(b):
            return dtype, "ieee"
    exact = max(a.mantissa_bits, b.mantissa_bits) <= TF32_MANTISSA
    return torch.float32, "tf32" if exact else "ieee"


def flags(a: Format, b: Format, *, coded: tuple[bool, bool] = (True, True), out: Format | None = None,
          keep: bool = False, stats: bool = True, scaled: tuple[bool, bool] = (True, True), bias: bool = False,
          middle: torch.dtype = torch.float32) -> dict[str, object]:  # fmt: skip
    """Return the compile-time arguments for operands of formats ``a`` and ``b`` and codes ``out``, if any."""
    dtype, precision = dot_dtype(a, b)
    if dtype == torch.bfloat16 and compat.runs_in_interpreter(matmul_kernel):
        dtype = torch.float32  # the interpreter multiplies bfloat16 as if it were integers; the numbers are the same
    return {
        "DECODE_A": device.decoder(a) if coded[0] else None,
        "DECODE_B": device.decoder(b) if coded[1] else None,
        "ENCODE": device.encoder(out, keep=keep) if out is not None else None,
        "LIMITS": thresholds(format_row(out)) if out is not None else (),
        "DTYPE": _TRITON[dtype],
        "PRECISION": precision,
        "MIDDLE": _TRITON[middle],
        "SCALED_A": scaled[0],
        "SCALED_B": scaled[1],
        "BIAS": bias,
        "STATS": stats and out is not None,
        "CARRIED": symbolic.CARRIED,
        "GROUP": _GROUP,
    }


def tile_flags(tile: Tile) -> dict[str, int]:
    """Return the compile-time arguments of a tile."""
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}


_PLAIN = {torch.bfloat16: BF16, torch.float16: FP16}


def matmul(
    a: Operand,
    b: Operand,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: Output | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the product (M, N) and the striped counters.

    The product is rounded to ``dtype`` and, with ``out``, then stored as codes. ``tile`` None: the fastest of `TILES`
    for the shape, found at its first run. Shapes whose rows round up to the same power of two count as one.
    """
    (m, k), n = a.codes.shape, b.codes.shape[1]
    formats = [x.fmt or _PLAIN.get(x.codes.dtype, FP32) for x in (a, b)]
    result = torch.empty(m, n, dtype=dtype if out is None else out.fmt.code_dtype, device=a.codes.device)
    counts = torch.zeros(SITE_COUNTERS, dtype=torch.int32, device=a.codes.device)
    if not result.numel():
        return result, counts
    static = flags(
        *formats, coded=(a.fmt is not None, b.fmt is not None), out=None if out is None else out.fmt,
        keep=bool(out and out.keep), stats=bool(out and out.stats), middle=dtype, bias=bias is not None,
        scaled=(a.exponent is not None, b.exponent is not None),
    )  # fmt: skip
    spare = counts  # passed for absent tensors, never read
    args = (
        a.codes, b.codes, spare if bias is None else bias, spare if a.exponent is None else a.exponent,
        spare if b.exponent is None else b.exponent, spare if out is None else out.row, result, counts, m, n, k,
        *a.codes.stride(), *b.codes.stride(), triton.next_power_of_2(m),
    )  # fmt: skip
    stored = [str(x.codes.dtype if x.fmt is None else x.fmt.name) for x in (a, b)] + [out and out.fmt.name]
    layout = [step == 1 for x in (a, b) for step in x.codes.stride()]
    wanted = [static[name] for name in ("SCALED_A", "SCALED_B", "BIAS", "STATS")]
    call = _Call(args, static, (*stored, dtype, *wanted, triton.next_power_of_2(m), n, k, *layout))
    if tile is None and is_noting():
        call.note()
    else:
        call.run(tile or call.fastest())
    return result, counts


@dataclass(frozen=True)
class _Call:
    """One product: the kernel's arguments except for the tile."""

    args: tuple[Any, ...]
    static: dict[str, Any]
    facts: tuple[object, ...]
    """Facts that decide, beside the GPU, which tile is fastest."""

    def run(self, tile: Tile) -> None:
        m, n = self.args[8:10]
        grid = (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)
        enqueue(matmul_kernel, grid, *self.args, **self._options(tile))

    def note(self) -> None:
        """Note the launch with the tile that is known to be fastest, or with all tiles that will be tried."""
        known = tuning.known_tile(self._key)
        tiles = self._tiles if known is None else [known]
        note_alternatives(matmul_kernel, self.args, [self._options(tile) for tile in tiles])

    def fastest(self) -> Tile:
        if compat.runs_in_interpreter(matmul_kernel):
            return SMALL
        tile = tuning.known_tile(self._key)
        if tile is None:
            tile = tuning.fastest(self._key, self._tiles, self.run)
            self.args[7].zero_()  # the timed runs counted too
        return tile

    def _options(self, tile: Tile) -> dict[str, object]:
        shape = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
        return {**self.static, **tile_flags(tile), **shape}

    @property
    def _key(self) -> str:
        return tuning.key_of(self._device, *self.facts)

    @property
    def _tiles(self) -> list[Tile]:
        major, minor = torch.cuda.get_device_capability(self._device)
        return [tile for tile in TILES if tile.least_arch <= 10 * major + minor]

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.args[0].device
        return device
