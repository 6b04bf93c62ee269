"""Call Triton kernels in graphs, compile them ahead of time, and check where they can run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.codecache import PyCodeCache

from fxprec.compat.versions import OLDEST_TRITON, version_of, words


class TritonCalls:
    """Calls of Triton kernels as graph nodes, with the operator that Dynamo uses for a user's kernel."""

    target = triton_kernel_wrapper_functional

    def keywords(
        self, source: str, name: str, programs: object, arguments: dict[str, object], written: list[str]
    ) -> dict[str, Any]:
        """Return the operator's keyword arguments. The source is written to Inductor's cache folder."""
        return {
            "kernel_idx": kernel_side_table.add_kernel(load_kernel(source, name)),
            "constant_args_idx": kernel_side_table.add_constant_args({}),
            "grid": [(programs, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": arguments,
            "tensors_to_clone": written,
        }


def load_kernel(source: str, name: str) -> Any:
    """Return the Triton function ``name`` of generated ``source``."""
    return getattr(PyCodeCache.load(source), name)


def triton_interprets() -> bool:
    """Return whether Triton, which must be installed, runs kernels in its interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def runs_in_interpreter(kernel: object) -> bool:
    """Return whether a Triton function was made for the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernel, InterpretedFunction)


def why_not_started(error: BaseException | None) -> str | None:
    """Return why a compiled kernel cannot start, in Triton's or Inductor's words; None for other errors."""
    while error is not None:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        if type(error).__name__ == "OutOfResources" and type(error).__module__.startswith("triton"):
            return line
        if "No valid triton configs" in line and "OutOfResources" in line:
            return line.partition("OutOfResources:")[2].strip() or line
        error = error.__cause__ or error.__context__
    return None


def kernel_running(error: BaseException) -> str | None:
    """Return the name of the Triton kernel whose launch raised ``error``, or None if unknown."""
    found, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        name = getattr(getattr(owner, "fn", None), "__name__", None)
        found = name if isinstance(name, str) else found
        trace = trace.tb_next
    return found


def no_triton(device: torch.device) -> str | None:
    """Return why generated Triton kernels cannot run on ``device``, or None if they can."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    if version_of(triton.__version__) < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {words(OLDEST_TRITON)}"
    interpreted = triton_interprets()
    if device.type == "cpu":
        why = "a CPU runs Triton kernels in Triton's interpreter only, which TRITON_INTERPRET=1 chooses at start"
        return None if interpreted else why
    if interpreted:
        return "TRITON_INTERPRET=1 keeps Triton from compiling for a GPU"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= OLDEST_GPU else f"compute capability {major}.{minor} is below 8.0"


def refused_gpu(device: torch.device) -> str | None:
    """Return why fxprec has no code for a GPU, or None if it has. A GPU that is absent and only planned for passes."""
    if torch.version.hip is not None:
        return f"device '{device}' is AMD's (ROCm {torch.version.hip}): fxprec's code is for NVIDIA's GPUs"
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= OLDEST_GPU:
        return None
    needed = f"fxprec's code needs {words(OLDEST_GPU)}, for bfloat16"
    return f"device '{device}' has compute capability {major}.{minor}: {needed}"


OLDEST_GPU = (8, 0)
OLDEST_WITH_FP8 = (8, 9)


def no_native_fp8(device: torch.device) -> str | None:
    """Return why Inductor's code cannot use 8-bit float dtypes on ``device``, or None if it can."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= OLDEST_WITH_FP8:
        return None
    return f"compute capability {major}.{minor} has no casts to 8-bit floats"


def compile_triton(
    kernel: object,
    kinds: Mapping[str, str],
    constants: Mapping[str, object],
    aligned: Iterable[int],
    arch: int,
    options: Mapping[str, object],
) -> Any:
    """Compile a Triton function for an NVIDIA architecture (80, 89, 90, 100); no GPU is needed.

    ``kinds``: Triton's type of each parameter. ``aligned``: positions of parameters divisible by 16. The result has
    ``asm`` (``"ptx"``, ``"cubin"``) and ``metadata.shared`` (bytes). Raises what Triton's compiler raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, dict(kinds), dict(constants), attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))


def current_architecture() -> int:
    """Return the current GPU's compute capability as an int, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def triton_tool(name: str) -> Path:
    """Return the path of a program that comes with Triton, such as ``cuobjdump`` or ``ptxas``."""
    from triton.backends import nvidia

    return Path(str(nvidia.__file__)).parent / "bin" / name
