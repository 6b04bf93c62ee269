"""Allocate torch's CPU tensors close together, so that a process holds little more than its live bytes.

malloc places a tensor into any hole that fits, among everything that a compiler left behind: a step with 28 MB live at
its peak made a process grow by 92 MB. Here tensors of 16 KiB and more come from one region of addresses, each at the
lowest place that fits. Pages without a tensor stay for the next step, up to the number of live bytes, or 64 MiB if that
is more. Beyond that, the highest pages go back to the system when a tensor is freed.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from fxprec.numerics import native

_SIGNATURES = {
    "fxprec_compact_install": (ctypes.c_int,),
    "fxprec_compact_is_installed": (ctypes.c_int,),
    "fxprec_compact_uninstall": (None,),
    "fxprec_compact_sizes": (None, ctypes.c_void_p),
    "fxprec_compact_trim": (None,),
    "fxprec_compact_hold": (None, ctypes.c_double),
}
_WHY_NOT = {
    0: "another allocator has replaced torch's",
    -1: "the system does not give this process 32 GiB of addresses (ulimit -v), of which half is used",
}


class Sizes(NamedTuple):
    """Bytes of tensors in the region."""

    live: int
    end: int
    """Bytes up to the end of the highest tensor; those beyond ``live`` are holes."""
    idle: int
    """Bytes of pages that hold no tensor and may still be resident."""


def is_installed() -> bool:
    """Return whether new CPU tensors of the process are allocated in the region."""
    return _library.cache_info().currsize > 0 and bool(_library().fxprec_compact_is_installed())


def install() -> str | None:
    """Allocate new CPU tensors of the whole process in the region; return why that is impossible, or None.

    A further call does nothing. A child of ``fork`` keeps the allocator.
    """
    if sys.platform != "linux":
        return f"it runs on Linux only, and this is {sys.platform}"
    try:
        library = _library()
    except Exception as error:  # any failure of a foreign compiler
        return f"it did not compile ({str(error).partition(chr(10))[0]})"
    return _WHY_NOT.get(library.fxprec_compact_install())


def uninstall() -> None:
    """Allocate new tensors by the system again; tensors in the region stay there."""
    _library().fxprec_compact_uninstall()


def sizes() -> Sizes:
    """Return the bytes in the region; zeros if the allocator was never installed."""
    out = (ctypes.c_int64 * 3)()
    _library().fxprec_compact_sizes(out)
    return Sizes(*out)


def trim() -> None:
    """Give every page without a tensor back to the system."""
    _library().fxprec_compact_trim()


def hold(seconds: float) -> None:
    """Hold the region's lock for a time, as a thread in the middle of a call does; for tests of fork."""
    _library().fxprec_compact_hold(seconds)


@cache
def _library() -> ctypes.CDLL:
    libraries = Path(torch.__file__).parent / "lib"
    return native.load(native.text_beside(__file__, "compact.cpp"), _SIGNATURES, (f"-L{libraries}", "-lc10"))
