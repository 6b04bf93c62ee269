"""Compile kernels for NVIDIA architectures without a GPU, and read what the machine code uses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 89, 90, 100)
# Bytes of shared memory a block can have (CUDA programming guide, compute capabilities).
SHARED_LIMIT: Mapping[int, int] = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


@dataclass(frozen=True)
class Resources:
    """What one thread block of a compiled kernel uses."""

    arch: int
    registers: int
    """Per thread."""
    spilled: int
    """Bytes per thread that went to local memory."""
    shared: int
    """Bytes per block."""

    @property
    def fits(self) -> bool:
        return self.spilled == 0 and self.shared <= SHARED_LIMIT[self.arch]

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def compile_for(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], arch: int, **options: Any
) -> Any:
    """Return the compiled kernel; ``signature`` names the run-time arguments' types, ``constants`` the others.

    A type with a ``:16`` behind it is one that Triton's launcher would find divisible by 16: an aligned pointer, a
    size. Raises what Triton raises where the architecture cannot run the kernel.
    """
    kinds = {name: kind.partition(":")[0] for name, kind in signature.items()} | dict.fromkeys(constants, "constexpr")
    ordered = {name: kinds[name] for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(ordered) if signature.get(name, "").endswith(":16")
    }
    source = ASTSource(kernel, ordered, dict(constants), aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": False, **options})


def resources(compiled: Any, arch: int) -> Resources:
    """Return what a kernel of `compile_for` uses, as NVIDIA's own disassembler reads it from the cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        )
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", run.stdout)}
    spilled = max(used["STACK"], used["LOCAL"])
    return Resources(arch, used["REG"], spilled, int(compiled.metadata.shared))
