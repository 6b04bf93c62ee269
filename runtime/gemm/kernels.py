"""List the kernels that training uses, by format, layout and tile, to compile them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fxprec.ir.symbolic import TABLE_COLUMNS
from fxprec.numerics import ahead, device
from fxprec.numerics.formats import parse
from fxprec.numerics.stats import parts_of
from fxprec.runtime.gemm import matmul, totals, transpose_kernels
from fxprec.runtime.gemm.tiles import TILES, Tile


@dataclass(frozen=True)
class Specialization:
    """One kernel with everything that its machine code depends on."""

    name: str
    kernel: object
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]

    def compile(self, arch: int) -> Any:
        """Compile for an architecture (80, 89, 90, 100) without a GPU. Raises what Triton raises."""
        return ahead.compile_for(self.kernel, self.signature, self.constants, arch, **self.options)


OLDEST_WITH_CASTS = 89
# (format, dtype that is rounded, layout): "rows" are aligned as those of activations, "strided" has any strides.
_CASTS = (
    ("e4m3fn", "fp32", "rows"),
    ("e5m2_sat", "bf16", "rows"),
    ("1-4-3+4", "fp32", "rows"),
    ("1-6-9", "fp32", "rows"),
    ("e4m3fn", "fp32", "strided"),
)
# (format of a, format of b, format of the result's codes or None).
_PRODUCTS = (
    ("e4m3fn", "e5m2_sat", None),
    ("1-4-3+4", "1-5-2", "1-5-2"),
    ("1-6-9", "1-4-3+4", None),
    ("1-6-9", "1-4-3+4", "1-6-9"),
)


def cases(arch: int, *, quick: bool = False) -> Iterator[Specialization]:
    """Yield the kernels used on an architecture; ``quick``: one of each kind."""
    yield from (cast(*case, arch) for case in (_CASTS[:1] if quick else _CASTS))
    yield transposition()
    yield from _totals()
    yield _gathered()
    tiles = [t for t in TILES if t.least_arch <= arch]
    for a, b, out in _PRODUCTS[1:2] if quick else _PRODUCTS:
        yield from (product(a, b, out, tile) for tile in (tiles[:1] if quick else tiles))


def _pointer(name: str) -> str:
    fmt = parse(name)
    return f"*u{8 * fmt.code_dtype.itemsize}:16"


def cast(
    name: str, source: str, layout: str, arch: int, *, row_major: bool = True, stats: bool = True
) -> Specialization:
    """Return the kernel that rounds a ``source`` matrix to codes of format ``name`` and transposes them."""
    fmt = parse(name)
    signature = {"x_ptr": f"*{source}:16", "row_ptr": "*i32", "q_ptr": _pointer(name), "t_ptr": _pointer(name)}
    signature |= {"counts_ptr": "*i32:16", "m": "i32:16", "n": "i32:16", "stride_m": "i32:16"}
    keep, hardware = fmt.nan_code is not None, arch >= OLDEST_WITH_CASTS and device.has_instruction(fmt)
    constants = dict(transpose_kernels.flags(fmt, keep=keep, row_major=row_major, stats=stats, hardware=hardware))
    if layout == "rows":
        constants["stride_n"] = 1
    else:
        signature = {key: kind.removesuffix(":16") for key, kind in signature.items()} | {"stride_n": "i32"}
    title = f"quantize+transpose {source} to {name}, {layout}"
    return Specialization(
        title, transpose_kernels.quantize_transpose_kernel, signature, constants, {"num_warps": transpose_kernels.WARPS}
    )


def transposition() -> Specialization:
    """Return the kernel that transposes 8-bit codes."""
    signature = {"q_ptr": "*u8:16", "t_ptr": "*u8:16", "m": "i32:16", "n": "i32:16", "stride_m": "i32:16"}
    constants = {"stride_n": 1, "ROWS": transpose_kernels.ROWS, "COLUMNS": transpose_kernels.COLUMNS}
    return Specialization(
        "transpose u8", transpose_kernels.transpose_kernel, signature, constants, {"num_warps": transpose_kernels.WARPS}
    )


def _totals() -> Iterator[Specialization]:
    sites = parts_of([0, 1], [4096, 8192], [1 << 20, 1 << 24], [False, True], [True, False], [True, False])
    facts = totals.flags(sites, TABLE_COLUMNS)
    signature = {"counts_ptr": "*i32:16", "moments_ptr": "*fp32:16", "share_ptr": "*fp64:16"}
    signature |= {"pitch": "i32:16", "moments_pitch": "i32:16", "outer": "i32"}
    constants, options = totals.shares_flags(facts, totals.MOST_SPLITS), {"num_warps": totals.WARPS}
    yield Specialization("shares of totals", totals.shares_kernel, signature, constants, options)
    signature = {"share_ptr": "*fp64:16", "table_ptr": "*i32:16", "out_ptr": "*fp64:16"}
    constants = totals.totals_flags(facts, totals.MOST_SPLITS)
    yield Specialization("totals", totals.totals_kernel, signature, constants, {"num_warps": 1})


def _gathered() -> Specialization:
    signature = {"counters_ptr": "*i32:16", "out_ptr": "*fp64:16"}
    return Specialization("gathered", totals.gather_kernel, signature, totals.GATHER, {"num_warps": 1})


def product(a: str, b: str, out: str | None, tile: Tile) -> Specialization:
    """Return the generated GEMM of formats ``a`` and ``b`` in one tile; ``out`` None: the result is bfloat16."""
    signature = {"a_ptr": _pointer(a), "b_ptr": _pointer(b), "bias_ptr": "*bf16:16", "exp_a_ptr": "*i32"}
    signature |= {"exp_b_ptr": "*i32", "row_ptr": "*i32", "out_ptr": _pointer(out) if out else "*bf16:16"}
    signature |= {"counts_ptr": "*i32:16", "m": "i32:16", "n": "i32:16", "k": "i32:16", "bucket": "i32:16"}
    signature |= {"stride_am": "i32:16", "stride_bn": "i32:16"}  # operands are contiguous in the summed dimension
    codes = None if out is None else parse(out)
    constants = matmul.flags(parse(a), parse(b), out=codes, bias=True, middle=torch.bfloat16) | matmul.tile_flags(tile)
    constants |= {"stride_ak": 1, "stride_bk": 1}
    title = f"gemm {a} x {b} to {out or 'bf16'}, {tile.rows}x{tile.columns}x{tile.depth}"
    return Specialization(
        title, matmul.matmul_kernel, signature, constants, {"num_warps": tile.warps, "num_stages": tile.stages}
    )
