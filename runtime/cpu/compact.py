"""torch's CPU tensors close together, so that the memory a process holds follows what is live.

malloc places a tensor into any hole that fits, among all that a compiler left behind: a step with 28 MB live at its
peak made a process grow by 92 MB. Here tensors of 16 KiB and more come from one region of addresses, each at the lowest
place that fits; what lies above the highest place used within 10 seconds goes back to the system.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from fxprec.numerics import native

_SOURCE = Path(__file__).with_name("compact.cpp")
_SIGNATURES = {
    "fxprec_compact_install": (ctypes.c_int,),
    "fxprec_compact_uninstall": (None,),
    "fxprec_compact_sizes": (None, ctypes.c_void_p),
    "fxprec_compact_window": (None, ctypes.c_double),
    "fxprec_compact_trim": (None,),
    "fxprec_compact_hold": (None, ctypes.c_double),
}
_WHY_NOT = {
    0: "another allocator has taken the place of torch's",
    -1: "the system gives this process no 16 GiB of addresses (ulimit -v)",
}

log = logging.getLogger(__name__)


class Sizes(NamedTuple):
    """Bytes of tensors in the region."""

    live: int
    end: int
    """Up to the end of the highest tensor: what is above ``live`` are holes."""
    touched: int
    """Up to the highest place that may still be resident."""


def install() -> str | None:
    """Have new CPU tensors of the whole process lie close together; return why that cannot be, or None.

    Once done it does nothing. A child of ``fork`` keeps it.
    """
    if sys.platform != "linux":
        return f"it is written for Linux, and this is {sys.platform}"
    try:
        library = _library()
    except Exception as error:  # any failure of a foreign compiler
        return f"it did not compile ({str(error).partition(chr(10))[0]})"
    why = _WHY_NOT.get(library.fxprec_compact_install())
    if why is None:
        log.info("CPU tensors of 16 KiB and more lie in one region of addresses from now on")
    return why


def uninstall() -> None:
    """Have new tensors come from the system again; those in the region stay there."""
    _library().fxprec_compact_uninstall()


def sizes() -> Sizes:
    """Return what the region holds; nothing where it was never installed."""
    out = (ctypes.c_int64 * 3)()
    _library().fxprec_compact_sizes(out)
    return Sizes(*out)


def trim() -> None:
    """Give the system back what lies above the highest tensor, now."""
    _library().fxprec_compact_trim()


def set_window(seconds: float) -> None:
    """Set after how many seconds without use what lies above the highest tensor is given back."""
    _library().fxprec_compact_window(seconds)


def hold(seconds: float) -> None:
    """Hold the region's lock, as a thread in the middle of a call does: for tests of what a fork meets."""
    _library().fxprec_compact_hold(seconds)


@cache
def _library() -> ctypes.CDLL:
    libraries = Path(torch.__file__).parent / "lib"
    return native.load(_SOURCE.read_text(encoding="utf-8"), _SIGNATURES, (f"-L{libraries}", "-lc10"))
