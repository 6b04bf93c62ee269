"""Launch the kernels around GEMMs, or note the launches to compile the kernels before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fxprec.runtime import on_device

ALIGNMENT = 16  # Triton specialises code on addresses and integers divisible by this, and on integers equal to 1
_UNALIGNED = ALIGNMENT + 1
_LARGE = 1 << 31

Alternatives = tuple["Launch", ...]
"""Launches of which one is enough: one product in different tiles."""


class TritonKernel(Protocol):
    """A kernel as returned by ``triton.jit``."""

    def warmup(self, *args: object, grid: tuple[int, ...], **options: object) -> object:
        """Compile for arguments of these types, and launch nothing. Raises what Triton's compiler raises."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


@dataclass(frozen=True)
class Pointer:
    """A tensor as Triton's compiler sees it. Its storage begins at a multiple of 16 bytes."""

    dtype: torch.dtype
    offset: int
    """Bytes from that multiple, below 16."""

    def data_ptr(self) -> int:
        """Return a stand-in for the address; Triton's compiler reads only its alignment."""
        return self.offset


@dataclass(frozen=True)
class Launch:
    """One launch, described by what its machine code depends on."""

    kernel: TritonKernel
    device: torch.device
    arguments: tuple[Pointer | int, ...]
    options: tuple[tuple[str, object], ...]
    """Keyword arguments in the order of the call: their order is part of Triton's key for compiled code."""

    @classmethod
    def of(cls, kernel: TritonKernel, arguments: Sequence[Any], options: dict[str, object]) -> Launch:
        """Describe a launch with these arguments."""
        device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
        return cls(kernel, device, tuple(map(_specialised, arguments)), tuple(options.items()))

    def why_not_compiled(self) -> str | None:
        """Compile the kernel as the launch would; return the error's type and last line, or None if it compiles."""
        try:
            with on_device.current(self.device):
                self.kernel.warmup(*self.arguments, grid=(1,), **dict(self.options))
        except Exception as error:  # the compiler's own types differ by version
            lines = str(error).strip().splitlines()
            return f"it does not compile: {type(error).__name__}: {lines[-1] if lines else 'no reason given'}"
        return None


def _specialised(argument: torch.Tensor | int) -> Pointer | int:
    """Return a value that stands for all arguments for which Triton compiles the same code."""
    if isinstance(argument, torch.Tensor):
        return Pointer(argument.dtype, int(argument.storage_offset()) * argument.itemsize % ALIGNMENT)
    if argument == 1 or argument >= _LARGE:
        return argument
    return _UNALIGNED if argument % ALIGNMENT else ALIGNMENT


_noted: ContextVar[list[Alternatives] | None] = ContextVar("noted launches", default=None)


@contextmanager
def noting() -> Iterator[list[Alternatives]]:
    """Within the context, append launches to the yielded list instead of starting them."""
    found: list[Alternatives] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def is_noting() -> bool:
    """Return whether launches are noted instead of started."""
    return _noted.get() is not None


def enqueue(kernel: TritonKernel, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Launch a kernel on the tensors' device, or note the launch."""
    if (found := _noted.get()) is not None:
        found.append((Launch.of(kernel, arguments, options),))
        return
    device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
    with on_device.current(device):
        kernel[grid](*arguments, **options)


def note_alternatives(kernel: TritonKernel, arguments: Sequence[object], options: Sequence[dict[str, object]]) -> None:
    """Note launches of which the first run will choose the fastest."""
    found = _noted.get()
    assert found is not None
    found.append(tuple(Launch.of(kernel, arguments, each) for each in options))
