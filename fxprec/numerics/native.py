"""Compiles C++ kernels once, by Inductor's own builder: its compiler, its flags, its disk cache.

A kernel cannot check the memory that it reads and writes. So callers get each tensor's pointer from `address`, which
checks the tensor.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import torch

from fxprec.errors import FxprecWarning, LoweringError, NativeArgumentError

Signatures: TypeAlias = Mapping[str, Sequence[type | None]]
"""For each function the ctypes of its result (None for void) and of its arguments; an address is a ``c_void_p``."""

SANITIZER = "FXPREC_SANITIZE"
"""The environment variable that builds kernels with a sanitizer (``address``); `./dev asan` sets it."""


def text_beside(module: str, name: str) -> str:
    """Return the text of the C++ file ``name`` beside a module, whose ``__file__`` is given."""
    return Path(module).with_name(name).read_text(encoding="utf-8")


def load(source: str, signatures: Signatures, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile C++ ``source`` for the CPU and load it. Raises what Inductor's builder raises, and `LoweringError` if its
    cache folder cannot be written.
    """
    compat = inductor()
    try:
        library: ctypes.CDLL = compat.build_cpp(source, (*flags, *_sanitizing()))
    except Exception as error:  # whatever the builder raises
        cause = compat.unwritable_cache(error)
        if cause is None:
            raise
        raise LoweringError(cause) from error
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def inductor() -> ModuleType:
    """Import and return `fxprec.compat`, which imports Inductor, for modules that need it only once a kernel is used.

    Inductor's own DeprecationWarnings are muted: under an "error" filter of the caller, compilation would fail.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("fxprec.compat")


def load_or_warn(source: str, signatures: Signatures, slower: str, flags: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Return the library; if it does not compile, warn with a text that begins with ``slower`` and return None."""
    try:
        return load(source, signatures, flags)
    except Exception as error:  # any failure of a foreign compiler; the caller's plain version gives the same result
        cause = str(error).partition("\n")[0]
        warnings.warn(
            f"{slower}: its kernels did not compile ({cause}); give Inductor a C++ compiler (CXX)",
            FxprecWarning,
            stacklevel=3,
        )
        return None


def _sanitizing() -> tuple[str, ...]:
    kind = os.environ.get(SANITIZER)
    return (f"-fsanitize={kind}", "-g", "-fno-omit-frame-pointer") if kind else ()


def address(name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, like: torch.Tensor | None = None) -> int:
    """Return the address of ``numel`` elements of ``dtype`` that lie in CPU memory without gaps.

    If ``like`` is given, the elements must have its strides; otherwise the kernel may take them in any order. Raises
    `NativeArgumentError`, which calls the tensor ``name``. Costs a microsecond.
    """
    if (
        tensor.dtype == dtype
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.numel() == numel
        and (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor))
        and (like is None or tensor.stride() == like.stride())
        and not tensor.is_neg()
        and type(tensor).__torch_dispatch__ is _PLAIN
        and (not numel or tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + numel) * dtype.itemsize)
    ):
        return tensor.data_ptr()
    raise _refusal(name, tensor, dtype, numel, like)


def addresses(names: Sequence[str], tensors: Sequence[torch.Tensor], dtype: torch.dtype, numel: int) -> list[int]:
    """Return the `address` of each tensor, in half the time if it is contiguous: for an optimizer's many tensors."""
    size = numel * dtype.itemsize
    return [
        t.data_ptr()
        if t.dtype == dtype
        and type(t) in _OWN_MEMORY
        and t.is_cpu
        and t.numel() == numel
        and t.is_contiguous()
        and not t.is_neg()
        and t.untyped_storage().nbytes() == size  # owns its whole storage; `address` checks views and shorter storages
        else address(name, t, dtype, numel)
        for name, t in zip(names, tensors, strict=True)
    ]


def check_table(table: torch.Tensor, row: int, columns: int) -> None:
    """Raise `NativeArgumentError` unless ``table`` is int32 (rows, ``columns``) in CPU memory and has the row."""
    address("table", table, torch.int32, table.shape[0] * columns if table.dim() == 2 else -1)
    if not 0 <= row < table.shape[0]:
        raise NativeArgumentError(f"row is {row}; the table of a compiled kernel has rows 0 to {table.shape[0] - 1}")


_OWN_MEMORY = (torch.Tensor, torch.nn.Parameter)
_PLAIN = torch.Tensor.__torch_dispatch__  # that of a tensor with its own memory


def check_readable(name: str, tensor: torch.Tensor, dim: int | None = None) -> None:
    """Raise `NativeArgumentError` unless ``tensor`` is in CPU memory, with any strides, and has ``dim`` dimensions.

    Callers use this for tensors that torch copies before a kernel reads them: torch would read freed memory.
    """
    if (
        tensor.layout == torch.strided
        and tensor.is_cpu
        and not tensor.is_complex()
        and type(tensor).__torch_dispatch__ is _PLAIN
        and dim in (None, tensor.dim())
        and (not tensor.numel() or tensor.untyped_storage().nbytes() >= _end(tensor) * tensor.itemsize)
    ):
        return
    found = _described(tensor.dtype, tensor.numel(), str(tensor.device), "")
    shape = "" if dim is None else f" of {dim} dimensions"
    raise NativeArgumentError(
        f"{name} is {found}{_layout(tensor)}, shape {tuple(tensor.shape)}; a compiled kernel walks real numbers in CPU "
        f"memory: give a dense tensor{shape}"
    )


def _end(tensor: torch.Tensor) -> int:
    """Return the position in the storage just after the last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps) + 1


def _refusal(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, like: torch.Tensor | None
) -> NativeArgumentError:
    found = _described(tensor.dtype, tensor.numel(), str(tensor.device), "")
    wanted = _described(dtype, numel, "cpu", "" if like is None else f" with strides {tuple(like.stride())}")
    return NativeArgumentError(
        f"{name} is {found}{_layout(tensor)}; a compiled kernel walks {wanted} in memory without gaps: "
        "give a dense tensor of that kind"
    )


def _described(dtype: torch.dtype, numel: int, device: str, strides: str) -> str:
    return f"{numel} elements of {str(dtype)[6:]} on {device}{strides}"


def _layout(tensor: torch.Tensor) -> str:
    """Describe what may be wrong with a tensor of the right dtype, size and device: layout, type or strides."""
    if tensor.layout != torch.strided:
        return f", {str(tensor.layout)[6:]}"
    if type(tensor).__torch_dispatch__ is not _PLAIN:
        return f", a {type(tensor).__name__} without memory of its own"
    if tensor.is_neg():
        return ", negated only when read"
    return f" with strides {tuple(tensor.stride())} in {tensor.untyped_storage().nbytes()} bytes"
