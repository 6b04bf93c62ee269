"""Find the C++ compiler that Inductor calls."""

from __future__ import annotations

import functools
import subprocess

from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

NO_CXX_COMPILER = (
    "no C++ compiler found, which Inductor needs on a CPU; install one (Debian: apt install g++), set CXX to the one "
    "you have, or run without one by options={'lowering': 'eager'}, the slow reference"
)


@functools.cache
def cxx_compiler() -> str | None:
    """Return the name of Inductor's C++ compiler and the first line of its version; None if Inductor finds none."""
    try:
        name = get_cpp_compiler()
        said = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except Exception:  # of Inductor or of the system
        return None
    return f"{name}: {said.strip().partition(chr(10))[0]}"


def no_compiler(error: BaseException | None) -> str | None:
    """Return a message that Inductor found no C++ compiler, if an error or its cause says so; else None."""
    while error is not None:
        if isinstance(error, InvalidCxxCompiler):
            return NO_CXX_COMPILER
        error = error.__cause__ or error.__context__
    return None
