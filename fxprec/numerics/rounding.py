"""`quantize`, `encode` and `decode`: tensors in any number format, on any device.

Small tensors run op by op. Large ones run one fused kernel, compiled at first use. All formats share the kernel: a
format is a few integers that the kernel takes at run time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Literal, TypeAlias, overload

import torch

from fxprec import compat
from fxprec.errors import FormatError, FxprecWarning
from fxprec.numerics import codec, directed, native
from fxprec.numerics.block_rounding import BlockCodes, decode_blocks, encode_blocks, quantize_blocks
from fxprec.numerics.blocks import AnyFormat, BlockFormat, find
from fxprec.numerics.formats import BF16, FP16, FP32, Format
from fxprec.numerics.memory import empty_like
from fxprec.numerics.rows import CodeRow, FormatRow, Scalar, code_row, format_row

Rounding: TypeAlias = Literal["nearest", "stochastic", "zero"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "zero")

# 2 shared cores: 1e6 elements take 40 ms op by op and 16 ms compiled; the first compilation takes 5 to 12 s.
COMPILE_ABOVE = 1 << 20
"""Tensors of more elements than this use the compiled kernels."""

_CARRIERS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


def quantize(
    x: torch.Tensor,
    fmt: AnyFormat | str,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x`` rounded to the numbers of ``fmt``, in the shape and dtype of ``x``; the derivative is 1.

    ``rounding``: ``nearest`` (ties to the even code), ``stochastic`` (up with probability (x - down)/(up - down),
    reproducible from ``generator``; beyond the largest number as ``nearest``), or ``zero`` (finite values beyond
    the largest number become it). NaN stays NaN. ``out`` (same shape, dtype and device; may be ``x``) receives
    the result and is returned; it is not differentiated. Block formats round the result once more, to the dtype of
    ``x``, and do not round toward zero.

    Raises `FormatError` for an unknown format or rounding, and for a dtype that cannot hold the format's numbers. The
    dtype must be float32, bfloat16 or float16; float64 would be rounded twice.
    """
    fmt = find(fmt)
    _check_input(x, rounding)
    if isinstance(fmt, Format):
        _check_holds(x.dtype, fmt)
    if out is not None:
        _check_out(out, x)
        return _quantize(x.detach(), fmt, rounding, generator, out)
    if torch.is_grad_enabled() and x.requires_grad:
        apply: Callable[..., torch.Tensor] = _StraightThrough.apply  # typed in some versions of torch only
        return apply(x, fmt, rounding, generator)
    return _quantize(x, fmt, rounding, generator, None)


@overload
def encode(
    x: torch.Tensor, fmt: BlockFormat, rounding: Rounding = "nearest", generator: torch.Generator | None = None
) -> BlockCodes: ...


@overload
def encode(
    x: torch.Tensor, fmt: Format, rounding: Rounding = "nearest", generator: torch.Generator | None = None
) -> torch.Tensor: ...


@overload
def encode(
    x: torch.Tensor, fmt: str, rounding: Rounding = "nearest", generator: torch.Generator | None = None
) -> Any: ...


def encode(
    x: torch.Tensor,
    fmt: AnyFormat | str,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Any:
    """Return the codes of ``x`` rounded to ``fmt``, in ``fmt.code_dtype`` and the shape of ``x``.

    NaN becomes the format's NaN code, or the largest number if the format has no NaN. For a block format the result is
    a `BlockCodes`, in which a block that holds inf or NaN reads as NaN. Raises as `quantize`.
    """
    fmt = find(fmt)
    _check_input(x, rounding)
    if isinstance(fmt, BlockFormat):
        return encode_blocks(x, fmt, rounding, generator)
    with torch.no_grad():
        random = _random(x, generator) if rounding == "stochastic" else None
        return _run(_encode_kernel(rounding), x, random, fmt, fmt.code_dtype)


def decode(code: torch.Tensor | BlockCodes, fmt: AnyFormat | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of ``code`` (``fmt.code_dtype``) as ``dtype``, in the shape of ``code``.

    Raises `FormatError` for another code dtype, and for a ``dtype`` that cannot hold every number of the format. A
    block format is rounded to ``dtype``; for it, raises `FormatError` for `BlockCodes` of another format.
    """
    fmt = find(fmt)
    if isinstance(fmt, BlockFormat):
        if dtype != torch.float64:
            _check_dtype(dtype)
        return decode_blocks(code, fmt, dtype)  # type: ignore[arg-type]  # decode_blocks refuses other types
    if not isinstance(code, torch.Tensor):
        raise FormatError(f"codes of {fmt.name} are a tensor of {fmt.code_dtype}, not {type(code).__name__}")
    if code.dtype != fmt.code_dtype:
        raise FormatError(
            f"codes of {fmt.name} are {fmt.code_dtype}, not {code.dtype}; view or convert them to {fmt.code_dtype}"
        )
    if dtype != torch.float64:
        _check_dtype(dtype)
        if not _CARRIERS[dtype].contains(fmt):
            raise FormatError(f"{dtype} cannot hold every number of {fmt.name}; decode to torch.float32")
    carrier = torch.float32 if dtype == torch.float64 else dtype
    return _run(_decode_kernel, code, None, fmt, carrier).to(dtype)


class _StraightThrough(torch.autograd.Function):
    """A straight-through rounding: its derivative is 1, also where it saturates."""

    @staticmethod
    def forward(
        ctx: object, x: torch.Tensor, fmt: AnyFormat, rounding: Rounding, generator: torch.Generator | None
    ) -> torch.Tensor:
        return _quantize(x, fmt, rounding, generator, None)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad, None, None, None


def _quantize(
    x: torch.Tensor,
    fmt: AnyFormat,
    rounding: Rounding,
    generator: torch.Generator | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if isinstance(fmt, BlockFormat):
        result = quantize_blocks(x, fmt, rounding, generator)
        return result if out is None else out.copy_(result)
    with torch.no_grad():
        random = _random(x, generator) if rounding == "stochastic" else None
        return _run(_QUANTIZE_KERNELS[rounding], x, random, fmt, x.dtype, out)


def _random(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw 31 random bits for each element, in the order of the elements for any layout."""
    return torch.empty(x.shape, dtype=torch.int32, device=x.device).random_(generator=generator)


_Rows: TypeAlias = tuple[FormatRow[Scalar], CodeRow[Scalar]]
_Kernel: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, _Rows], torch.Tensor]


def _nearest(x: torch.Tensor, random: torch.Tensor | None, rows: _Rows) -> torch.Tensor:
    return codec.nearest(x.to(torch.float32), rows[0])


def _toward_zero(x: torch.Tensor, random: torch.Tensor | None, rows: _Rows) -> torch.Tensor:
    return directed.truncated(x.to(torch.float32), rows[0])


def _stochastic(x: torch.Tensor, random: torch.Tensor | None, rows: _Rows) -> torch.Tensor:
    assert random is not None
    return directed.dithered(x.to(torch.float32), random, rows[0])


_QUANTIZE_KERNELS: dict[Rounding, _Kernel] = {
    "nearest": _nearest,
    "zero": _toward_zero,
    "stochastic": _stochastic,
}


@cache
def _encode_kernel(rounding: Rounding) -> _Kernel:
    def kernel(x: torch.Tensor, random: torch.Tensor | None, rows: _Rows) -> torch.Tensor:
        if rounding == "nearest":  # as codes are rounded anyway
            return codec.codes(x.to(torch.float32), *rows)
        return codec.codes(_QUANTIZE_KERNELS[rounding](x, random, rows), *rows)

    return kernel


def _decode_kernel(code: torch.Tensor, random: torch.Tensor | None, rows: _Rows) -> torch.Tensor:
    wide = code.view(torch.int32) if code.dtype == torch.uint32 else code.to(torch.int32)
    return codec.numbers(wide, *rows)


def _run(
    kernel: _Kernel,
    x: torch.Tensor,
    random: torch.Tensor | None,
    fmt: Format,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the compiled kernel if the tensor is large, otherwise run op by op; into ``out``, or a new tensor."""
    rows = format_row(fmt), code_row(fmt)
    if _is_large(x) and kernel not in _FAILED:
        into = empty_like(x, dtype) if out is None else out
        if _run_compiled(kernel, x, random, rows, into):
            return into
    result = kernel(x, random, rows)
    result = result.view(dtype) if dtype == torch.uint32 else result.to(dtype)
    return result if out is None else out.copy_(result)


def _is_large(x: torch.Tensor) -> bool:
    """Return whether the kernel pays. Fake tensors have no memory to run it on; under a fake mode new ones are fake."""
    if torch.compiler.is_compiling() or x.numel() <= COMPILE_ABOVE:
        return False
    return compat.fake_mode_of(x.new_empty(0)) is None


def _run_compiled(
    kernel: _Kernel, x: torch.Tensor, random: torch.Tensor | None, rows: _Rows, out: torch.Tensor
) -> bool:
    """Run the fused kernel over flat tensors; return False, with one warning, if no kernel can be compiled."""
    flat = out.view(-1) if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device).view(-1)
    source = x.contiguous().view(-1)
    target = flat.view(torch.int32) if flat.dtype == torch.uint32 else flat
    try:
        fused = _fused(kernel, x.dtype, target.dtype, x.device.type)
        fused(source, None if random is None else random.view(-1), *_columns(rows, x.device), target)
    except Exception as error:
        cause = native.inductor().cause_of_no_code(error)
        if cause is None:
            raise
        warnings.warn(
            f"rounding runs op by op, several times slower: its kernel did not compile ({cause}); "
            "give Inductor a C++ compiler (CXX)",
            FxprecWarning,
            stacklevel=4,
        )
        _FAILED.add(kernel)
        return False
    if flat.data_ptr() != out.data_ptr():
        out.copy_(flat.view(out.shape))
    return True


@cache
def _columns(rows: _Rows, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the rows of a format as tensors on a device; cached, since an upload waits for the GPU's stream."""
    return tuple(torch.tensor(row, dtype=torch.int32, device=device) for row in rows)


_FAILED: set[_Kernel] = set()


@cache
def _fused(kernel: _Kernel, dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> Callable[..., None]:
    def into(
        x: torch.Tensor,
        random: torch.Tensor | None,
        row: torch.Tensor,
        codes: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        out.copy_(kernel(x, random, (FormatRow(*row.unbind()), CodeRow(*codes.unbind()))))

    native.inductor()
    # Dynamo counts recompilations by code object, so each combination gets its own.
    code = into.__code__.replace(co_name=f"round_{str(dtype)[6:]}_to_{str(out_dtype)[6:]}")
    function = FunctionType(code, into.__globals__, code.co_name, None, into.__closure__)
    return torch.compile(function, dynamic=True, fullgraph=True)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        raise FormatError("float64 would be rounded twice, through float32; convert with .float() where that is meant")
    if dtype not in _CARRIERS:
        raise FormatError(f"{dtype} holds no numbers to round; give float32, bfloat16 or float16")


def _check_input(x: torch.Tensor, rounding: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise FormatError(f"cannot round a {type(x).__name__}; give a torch.Tensor")
    _check_dtype(x.dtype)
    if rounding not in ROUNDINGS:
        raise FormatError(f"rounding={rounding!r} is unknown; use one of {list(ROUNDINGS)}")


def _check_holds(dtype: torch.dtype, fmt: Format) -> None:
    carrier = _CARRIERS[dtype]
    if not (carrier.contains(fmt) or fmt.contains(carrier)):
        raise FormatError(f"{dtype} cannot hold every number of {fmt.name}; quantize x.float() instead")


def _check_out(out: torch.Tensor, x: torch.Tensor) -> None:
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise FormatError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, the input {tuple(x.shape)} {x.dtype} on "
            f"{x.device}; make out with torch.empty_like(x)"
        )
