"""Compiles Triton kernels for NVIDIA architectures without a GPU, and reads what resources the machine code uses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxprec import compat
from fxprec.errors import first_line

ARCHITECTURES = (80, 89, 90, 100)
# Bytes of shared memory that a block can have (CUDA programming guide, compute capabilities).
SHARED_LIMIT: Mapping[int, int] = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


@dataclass(frozen=True)
class Resources:
    """Registers, spills and shared memory of one thread block of a compiled kernel."""

    arch: int
    registers: int
    """Per thread."""
    spilled: int
    """Bytes per thread that went to local memory."""
    shared: int
    """Bytes per block."""

    @property
    def excess(self) -> str | None:
        """Return which resource is exceeded, as a phrase for messages, or None."""
        if self.spilled:
            return f"spills {self.spilled} bytes"
        return f"needs {self.shared} bytes of shared memory" if self.shared > SHARED_LIMIT[self.arch] else None

    @property
    def fits(self) -> bool:
        """Return whether no resource is exceeded."""
        return self.excess is None

    def to_dict(self) -> dict[str, int]:
        """Return plain data."""
        return asdict(self)


def compile_for(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, object], arch: int, **options: object
) -> Any:
    """Return the compiled kernel. ``signature`` has the types of run-time arguments, ``constants`` the other arguments.

    A type that ends in ``:16`` is divisible by 16, as Triton's launcher would find an aligned pointer or a size to be.
    An integer type that ends in ``:1`` is equal to 1 and becomes a constant. Products are not contracted into fma.
    Raises what Triton raises if the architecture cannot run the kernel.
    """
    constants = {**constants, **{name: 1 for name, kind in signature.items() if kind.endswith(":1")}}
    kinds = {name: kind.partition(":")[0] for name, kind in signature.items()} | dict.fromkeys(constants, "constexpr")
    ordered = {name: kinds[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(ordered) if signature.get(name, "").endswith(":16")]
    return compat.compile_triton(kernel, ordered, constants, aligned, arch, {"enable_fp_fusion": False, **options})


def compile_generated(source: str, name: str, parameters: Sequence[tuple[str, str]], num_warps: int, arch: int) -> Any:
    """Compile a generated kernel as Inductor does: products may be contracted. Pointers are multiples of 16."""
    function = compat.load_kernel(source, name)
    function = getattr(function, "fn", function) if type(function).__name__ == "Autotuner" else function
    signature = {name: f"{kind}:16" if kind.startswith("*") else kind for name, kind in parameters}
    return compile_for(function, signature, {}, arch, num_warps=num_warps, enable_fp_fusion=True)


def why_not_generated(source: str, name: str, parameters: Sequence[tuple[str, str]], num_warps: int) -> str | None:
    """Compile a generated kernel for the current GPU; if that fails, return the compiler's first line."""
    try:
        compile_generated(source, name, parameters, num_warps, compat.current_architecture())
    except Exception as error:  # the compiler's own types differ by version
        return f"it does not compile: {first_line(error)}"
    return None


def resources(compiled: Any, arch: int) -> Resources:
    """Return what a compiled kernel uses, as NVIDIA's own disassembler reads it from the cubin.

    Local memory that Triton itself declares (a byte that a math function declares and nobody reads) is not a spill.
    """
    report = disassembled(compiled, "--dump-resource-usage")
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    declared = sum(_aligned(int(size)) for size in re.findall(r"__local_depot\d+\[(\d+)\]", compiled.asm["ptx"]))
    spilled = max(used["STACK"] - declared, used["LOCAL"], 0)
    return Resources(arch, used["REG"], spilled, int(compiled.metadata.shared))


def _aligned(size: int) -> int:
    """Return a stack size rounded up to a multiple of 8 bytes."""
    return (size + 7) // 8 * 8


def disassembled(compiled: Any, option: str) -> str:
    """Return what ``cuobjdump`` prints for a compiled kernel; ``option``: ``-sass``, ``--dump-resource-usage``."""
    tool = compat.triton_tool("cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(compiled.asm["cubin"])
        run = subprocess.run([str(tool), option, str(file)], capture_output=True, text=True, check=True, timeout=60)
    return run.stdout
