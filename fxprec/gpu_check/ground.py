"""The interface of an item: its device, and methods that record what was checked, what failed and what was skipped."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from fxprec.errors import GpuCheckError, first_line
from fxprec.gpu_check.findings import Findings
from fxprec.gpu_check.items import Mode
from fxprec.numerics.formats import Format

T = TypeVar("T")


class NotHere(Exception):
    """Raised inside a case that cannot be checked here. The message says why; the case does not count as a failure."""


class Ground:
    """One item's process. A case that raises counts as a failure; later cases still run."""

    def __init__(
        self,
        device: torch.device,
        mode: Mode,
        findings: Findings,
        *,
        seconds: float = 60.0,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self.device, self.mode, self.findings = device, mode, findings
        self._save, self._seconds, self._start = save, seconds, time.monotonic()
        self._asked, self._longest = math.inf, 0.0  # when `has_time` was asked last, the longest time between two calls

    @property
    def on_gpu(self) -> bool:
        """Return whether the item runs on a GPU, not in the interpreter or the compiler."""
        return self.mode == "gpu"

    @property
    def architecture(self) -> int:
        """The GPU's compute capability, 90 for 9.0; 90 without a GPU."""
        if not self.on_gpu:
            return 90
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    @property
    def seconds_left(self) -> float:
        """Seconds until the item's process is ended."""
        return self._seconds - (time.monotonic() - self._start)

    def has_time(self, what: str) -> bool:
        """Return whether 1.5 times the longest time between two calls is left, or record that ``what`` is left out."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._asked)
        self._asked = now
        if self.seconds_left < 1.5 * self._longest:
            self.leave_out(what, f"{self.seconds_left:.0f} s of the limit were left; give --limit a larger one")
            return False
        return True

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Record that a case passed, or why it failed."""
        self.findings.case = name
        self._save()
        try:
            yield
            if self.on_gpu:
                torch.cuda.synchronize(self.device)  # so that a kernel's fault belongs to this case
        except NotHere as why:
            self.leave_out(name, str(why))
        except Exception as error:  # whatever torch, Triton or a check raises
            self.findings.fail(name, first_line(error).removeprefix("GpuCheckError: "), traceback.format_exc(limit=-12))
        else:
            self.findings.passed.append(name)
        self.findings.case = ""
        self._save()

    def fact(self, name: str, value: object) -> None:
        """Record a figure by its name."""
        self.findings.facts[name] = value
        self._save()

    def leave_out(self, what: str, why: str) -> None:
        """Record what is not checked here, and why."""
        self.findings.left_out.append({"what": what, "why": why})

    def needs_gpu(self, what: str) -> bool:
        """Return whether there is a GPU; if not, record that ``what`` is left out."""
        if not self.on_gpu:
            self.leave_out(what, "needs a GPU")
        return self.on_gpu


def require(holds: bool, what: str) -> None:
    """Raise `GpuCheckError` with the message ``what`` unless ``holds``."""
    if not holds:
        raise GpuCheckError(what)


def present(value: T | None, what: str) -> T:
    """Return ``value``. Raise `GpuCheckError` with the message ``what`` if there is none."""
    if value is None:
        raise GpuCheckError(what)
    return value


def same(what: str, found: Tensor, wanted: Tensor) -> None:
    """Raise `GpuCheckError` unless two tensors are equal bit for bit; any NaN equals any other."""
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        sizes = f"{tuple(found.shape)} {found.dtype}, not {tuple(wanted.shape)} {wanted.dtype}"
        raise GpuCheckError(f"{what}: {sizes}")
    differ = ~_equal(found, wanted)
    if not bool(differ.any()):
        return
    first = [int(i) for i in differ.nonzero()[0]]
    pair = f"{found[tuple(first)].item()!r}, not {wanted[tuple(first)].item()!r}"
    raise GpuCheckError(f"{what}: {int(differ.sum())} of {differ.numel()} differ, the first at {first}: {pair}")


def same_codes(what: str, found: Tensor, wanted: Tensor, fmt: Format, is_nan: Tensor) -> None:
    """Raise `GpuCheckError` unless two tensors of codes are equal; a NaN's code may have either sign.

    A GPU's multiplication by the scale drops a NaN's sign, which has no meaning.
    """
    magnitude = (1 << (fmt.bits - 1)) - 1
    found, wanted = (_integers(codes.detach().cpu()) for codes in (found, wanted))
    same(what, *(torch.where(is_nan, codes & magnitude, codes) for codes in (found, wanted)))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _equal(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point():
        return _integers(a) == _integers(b)
    dtype = _BITS[a.itemsize]
    return (a.contiguous().view(dtype) == b.contiguous().view(dtype)) | (a.isnan() & b.isnan())


def _integers(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.itemsize]) if x.dtype != torch.bool else x


def within(what: str, found: float, bound: float) -> float:
    """Return ``found``. Raise `GpuCheckError` unless it is at most ``bound``; a NaN raises too."""
    if not found <= bound:
        raise GpuCheckError(f"{what} is {found:.4g}, above {bound:.4g}")
    return found


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the L2 norm of the difference over that of ``wanted``, in float64."""
    a, b = found.detach().cpu().double(), wanted.detach().cpu().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
