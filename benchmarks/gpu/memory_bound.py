"""Row 1: memory-bound kernels, in bytes that must move a second, against a device copy in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.fragments import compile_fragment, dequantize, quantize, storage_of, table_of
from benchmarks.gpu.suite import Row, Setting
from benchmarks.gpu.timing import in_turn
from fxprec.numerics.formats import parse

WANTED = 0.9
LO, BACK = "e4m3fn", "e5m2_sat"


def memory_bound(setting: Setting) -> Iterator[Row]:
    """Yield a row a kernel: GB/s, and the share of the copy's."""
    rows, columns = (64, 128) if setting.tiny else (16384, 8192)
    for name, make in _KERNELS.items():
        try:
            yield _row(name, make, rows, columns, setting)
        except Exception as error:
            raise RuntimeError(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def _row(name: str, make: Callable[..., Any], rows: int, columns: int, setting: Setting) -> Row:
    call, inputs = make(rows, columns, setting)
    outputs = call()
    moved = _bytes(inputs) + _bytes(outputs)
    source = torch.empty(moved // 2, dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    took = in_turn(
        {"kernel": call, "copy": lambda: target.copy_(source)}, setting.device, repeats=setting.repeats, flush=True
    )
    share = took["copy"] / took["kernel"]
    detail = {"bytes": moved, "seconds": took, "gb_per_s": moved / took["kernel"] / 1e9, "copy_share": share}
    return Row("memory", f"{name}, share of copy", share, "", f">= {WANTED}", share >= WANTED, detail)


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, Tensor))


def _input(rows: int, columns: int, setting: Setting, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, columns, device=setting.device).to(dtype)


def _codes(rows: int, columns: int, setting: Setting, fmt: str) -> Tensor:
    dtype = parse(fmt).torch_dtype
    assert dtype is not None
    codes = _input(rows, columns, setting).float().to(dtype)
    return codes if setting.no_fp8 is None else codes.view(torch.uint8)


def _fragment(function: Callable[..., Any], inputs: tuple[Tensor, ...], setting: Setting) -> tuple[Any, Any]:
    table = table_of([LO, BACK, "1-4-3+4"], setting.device)
    return compile_fragment(function, (*inputs, table), setting), inputs


def _quantize(rows: int, columns: int, setting: Setting, fmt: str = LO, row: int = 0) -> tuple[Any, Any]:
    return _fragment(lambda x, t: (quantize(x, t, row, fmt),), (_input(rows, columns, setting),), setting)


def _packed(rows: int, columns: int, setting: Setting) -> tuple[Any, Any]:
    return _quantize(rows, columns, setting, "1-4-3+4", 2)


def _quantize_transpose(rows: int, columns: int, setting: Setting) -> tuple[Any, Any]:
    x, table = _input(rows, columns, setting), table_of([LO], setting.device)
    storage = storage_of(LO, setting.device)
    return lambda: torch.ops.fxprec.quantize_transpose(x, table, 0, LO, storage, False, True, True), (x,)


def _transpose(rows: int, columns: int, setting: Setting) -> tuple[Any, Any]:
    q = _codes(rows, columns, setting, LO)
    return lambda: (torch.ops.fxprec.transpose_codes(q),), (q,)


def _norm(rows: int, columns: int, setting: Setting) -> tuple[Any, Any]:
    def norm(x: Tensor, weight: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return quantize(wide * inverse * weight, t, 0, LO), inverse

    inputs = _input(rows, columns, setting), torch.ones(columns, device=setting.device)
    return _fragment(norm, inputs, setting)


def _norm_backward(rows: int, columns: int, setting: Setting) -> tuple[Any, Any]:
    def backward(dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        normed = dequantize(x, t, LO) * inverse
        grad = dy.float() * weight
        dx = inverse * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return (quantize(dx, t, 1, BACK),)

    x = _codes(rows, columns, setting, LO)
    inverse = torch.rand(rows, 1, device=setting.device) + 0.5
    inputs = _input(rows, columns, setting), x, inverse, torch.ones(columns, device=setting.device)
    return _fragment(backward, inputs, setting)


def _gate(rows: int, columns: int, setting: Setting) -> tuple[Any, Any]:
    def gate(g: Tensor, u: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return (quantize(F.silu(g.float()) * u.float(), t, 0, LO),)

    return _fragment(gate, (_input(rows, columns, setting), _input(rows, columns, setting)), setting)


def _gate_backward(rows: int, columns: int, setting: Setting) -> tuple[Any, Any]:
    def backward(dy: Tensor, g: Tensor, u: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        gate, up = dequantize(g, t, LO), dequantize(u, t, LO)
        sigmoid = torch.sigmoid(gate)
        wide = dy.float()
        d_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
        return quantize(d_gate, t, 1, BACK), quantize(wide * gate * sigmoid, t, 2, BACK)

    codes = [_codes(rows, columns, setting, LO) for _ in range(2)]
    return _fragment(backward, (_input(rows, columns, setting), *codes), setting)


_KERNELS: dict[str, Callable[..., Any]] = {
    "quantize to e4m3fn": _quantize,
    "quantize to packed 1-4-3+4": _packed,
    "quantize+transpose": _quantize_transpose,
    "transpose of codes": _transpose,
    "rms norm+quantize": _norm,
    "rms norm backward+quantize": _norm_backward,
    "silu gate+quantize": _gate,
    "silu gate backward+quantize": _gate_backward,
}
