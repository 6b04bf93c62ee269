"""Inductor's Python wrapper run on tensors without memory: what it launches, and what is alive meanwhile.

The wrapper itself does the work: its allocations make meta tensors, its ``del`` statements free them, its kernels are
noted with the arguments they get. Nothing is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec.runtime.gemm.ops  # noqa: F401  wrappers call them
from benchmarks.gpu.roofline.traffic import KernelText

NUM_OUTPUTS = 1  # a network's own; what forward saves comes behind
# The caller's own: parameters, input, and the gradient that comes in. They are there in any case.
_OWNED = re.compile(r"primals_|tangents_")


@dataclass(frozen=True)
class Memory:
    """One tensor as a launch sees it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Memory:
        return cls(tuple(map(int, x.shape)), tuple(map(int, x.stride())), x.dtype)

    @property
    def elements(self) -> int:
        """Distinct ones: an expanded dimension counts once."""
        total = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            total *= size if stride else 1
        return total

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Launch:
    """A kernel or a library call, with the bytes it reads and writes."""

    name: str
    """``triton_...`` for Inductor's own kernels, else the operator."""
    inputs: tuple[Memory, ...]
    outputs: tuple[Memory, ...]
    read: int
    written: int
    kernel: str = ""
    """Name of a Triton kernel."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """What decides how many programs run, and how often their loops turn: ``xnumel``, ``r0_numel``, or ``programs``."""

    @property
    def is_generated(self) -> bool:
        return self.name.startswith("triton_")


@dataclass
class Replay:
    """What one half does."""

    launches: list[Launch] = field(default_factory=list)
    peak: int = 0
    """Most bytes alive at once, without what the caller owns."""
    saved: int = 0
    """Bytes that come from the forward half."""
    results: Sequence[Any] = ()
    """On the meta device."""


def replay(code: str, forward: Replay | None = None) -> Replay:
    """Run the wrapper of `absent.inductor_code`; of a backward half, on what ``forward`` saved."""
    found = Replay()
    with _no_device(found):
        names: dict[str, Any] = {"__name__": "inductor_wrapper", "__file__": "inductor_wrapper.py"}
        exec(compile(code, "inductor_wrapper.py", "exec"), names)
        names |= _stand_ins(found)
        taken, args = _argument_names(code), names["get_args"]()
        if forward is not None:
            args = _with_saved(args, taken, forward.results)
            forward.results = ()  # backward frees what it takes
        live = _Live(args, taken)
        found.saved = live.bytes
        with live, _Libraries(found):
            found.results = names["call"](args)
        found.peak = live.peak
    return found


def _argument_names(code: str) -> list[str]:
    (names,) = re.findall(r"^        ([\w, ]+?),? = args$", code, re.MULTILINE)
    return [name.strip() for name in names.split(",")]


def _with_saved(args: list[Any], names: list[str], results: Sequence[Any]) -> list[Any]:
    """Put forward's results where backward takes them, so that views of one tensor are one tensor's memory."""
    num_saved = sum(not name.startswith("tangents_") for name in names)
    saved = list(results[NUM_OUTPUTS : NUM_OUTPUTS + num_saved])
    shapes = [(x.shape, x.stride(), x.dtype) for x in saved]
    assert shapes == [(x.shape, x.stride(), x.dtype) for x in args[:num_saved]], "backward takes what forward saved"
    return saved + args[num_saved:]


def _stand_ins(found: Replay) -> Mapping[str, Any]:
    def ignore(*args: object) -> None: ...

    return {
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="meta"),
        "reinterpret_tensor": torch.as_strided,
        "assert_size_stride": ignore,
        "assert_alignment": ignore,
        "extern_kernels": _Externs(found),
    }


class _Externs:
    """Inductor's namespace of library calls that write into a buffer."""

    def __init__(self, found: Replay) -> None:
        self.found = found

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        def call(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
            if out is None:
                return getattr(torch.ops.aten, name)(*args, **kwargs)  # type: ignore[no-any-return]  # `_Libraries` notes it
            self.found.launches.append(_library(name, args, [out]))
            return out

        return call


_ALLOCATES = {torch.ops.aten.empty_strided.default, torch.ops.aten._reshape_alias.default}


class _Libraries(TorchDispatchMode):
    """Notes the operators the wrapper calls by themselves: attention, our own kernels."""

    def __init__(self, found: Replay) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        on_meta = {name: torch.device("meta") if name == "device" else arg for name, arg in (kwargs or {}).items()}
        results = func(*args, **on_meta)
        made = _tensors([results])
        if made and not _is_free(func):
            self.found.launches.append(_library(str(func), args, made))
        return results


def _is_free(func: Any) -> bool:
    """Return whether an operator only shows memory, or only allocates it."""
    return func.is_view or func in _ALLOCATES


def _library(name: str, args: Iterable[Any], results: list[Tensor]) -> Launch:
    inputs, outputs = tuple(map(Memory.of, _tensors(args))), tuple(map(Memory.of, results))
    return Launch(name, inputs, outputs, sum(m.bytes for m in inputs), sum(m.bytes for m in outputs))


def _tensors(args: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for arg in args:
        found += [arg] if isinstance(arg, Tensor) else _tensors(arg) if isinstance(arg, list | tuple) else []
    return found


class _Kernel:
    """One of Inductor's Triton kernels."""

    def __init__(self, found: Replay, name: str, source: str) -> None:
        self.found, self.name, self.text = found, name, KernelText.parse(source)

    def run(self, *args: Any, **options: object) -> None:
        """Note a launch; ``args`` are those of the kernel: tensors, places in a table, sizes."""
        memory = [Memory.of(x) for x in _tensors(args)]
        numbers = [int(x) for x in args if isinstance(x, int)]
        sizes = dict(zip(reversed(self.text.sizes), reversed(numbers), strict=False))
        extent = math.prod(sizes.values())
        read, written = self.text.traffic([m.elements for m in memory], [m.dtype.itemsize for m in memory], extent)
        pairs = list(zip(self.text.pointers, memory, strict=True))
        inputs = tuple(m for pointer, m in pairs if not pointer.startswith("out_ptr"))
        outputs = tuple(m for pointer, m in pairs if "out" in pointer)
        self.found.launches.append(Launch(self.name, inputs, outputs, read, written, self.name, sizes))


class _OwnKernel:
    """A generated kernel of fxprec's, which reads each input once and writes each output once."""

    def __init__(self, found: Replay, name: str, source: str) -> None:
        (parameters,) = re.findall(rf"^def {name}\((.*?)\):$", source, re.MULTILINE)
        self.found, self.name = found, name
        self.names = [p.strip() for p in parameters.split(",")]

    def run(self, *args: Any, **options: object) -> None:
        """Note a launch; ``args`` are those of the kernel, in order, then the grid."""
        tensors = [(n, Memory.of(x)) for n, x in zip(self.names, args, strict=False) if isinstance(x, Tensor)]
        inputs, outputs = (
            tuple(m for n, m in tensors if n.startswith(kind) and n[len(kind) :].isdecimal()) for kind in ("in", "out")
        )
        read, written = (sum(m.bytes for m in memory) for memory in (inputs, outputs))
        sizes = {"programs": math.prod(args[-3:])}
        self.found.launches.append(Launch(f"triton_{self.name}", inputs, outputs, read, written, self.name, sizes))


class _Live(TorchDispatchMode):
    """Keeps the sum of all storages alive that the caller does not own."""

    def __init__(self, args: list[Tensor], names: list[str]) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        self.known: set[int] = set()
        self.peak = 0
        owned = [x for x, name in zip(args, names, strict=True) if _OWNED.match(name)]
        self.owned = [StorageWeakRef(x.untyped_storage()) for x in owned if isinstance(x, Tensor)]
        self.known = {ref.cdata for ref in self.owned}
        self.note(_tensors(args))

    @property
    def bytes(self) -> int:
        self.sizes = {ref: size for ref, size in self.sizes.items() if not ref.expired()}
        return sum(self.sizes.values())

    def note(self, tensors: Iterable[Tensor]) -> None:
        alive = {ref.cdata for ref in self.sizes if not ref.expired()} | {ref.cdata for ref in self.owned}
        for x in tensors:
            storage = x.untyped_storage()
            ref = StorageWeakRef(storage)
            if ref.cdata not in alive:
                alive.add(ref.cdata)
                self.sizes[ref] = storage.nbytes()
        self.peak = max(self.peak, self.bytes)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.note(_tensors([results]))
        return results


@contextmanager
def _no_device(found: Replay) -> Iterator[None]:
    """Keep the wrapper from compiling kernels, from choosing a device, and from making real inputs."""

    def kernel(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> _Kernel | _OwnKernel:
        kind = _OwnKernel if "custom_kernel=True" in source else _Kernel
        return kind(found, name, source)

    def inputs(size: Any, stride: Any, dtype: torch.dtype, device: object) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")  # type: ignore[call-overload,no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCompile, "triton", kernel)
        patch.setattr(AsyncCompile, "wait", lambda self, scope: None)
        patch.setattr(torch._dynamo.testing, "rand_strided", inputs)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        patch.setattr(torch.cuda, "_DeviceGuard", lambda index: nullcontext())
        patch.setattr(torch.cuda, "set_device", lambda index: None)
        yield
