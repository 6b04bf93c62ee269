"""C++ kernels, compiled once by Inductor's own builder: its compiler, its flags, its disk cache."""

from __future__ import annotations

import ctypes
import warnings

from fxprec.errors import FxprecWarning


def load(source: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile C++ ``source`` for the CPU and load it. Raises what Inductor's builder raises."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source, device_type="cpu", extra_flags=flags)  # type: ignore[no-any-return]


def load_or_warn(source: str, slower: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return the library, or None where it does not compile, with a warning that begins with ``slower``."""
    try:
        return load(source, flags)
    except Exception as error:  # any failure of a foreign compiler; the caller's plain form gives the same result
        cause = str(error).partition("\n")[0]
        warnings.warn(
            f"{slower}: its kernels did not compile ({cause}); give Inductor a C++ compiler (CXX)",
            FxprecWarning,
            stacklevel=3,
        )
        return None
