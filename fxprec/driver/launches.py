"""Generated kernels that compile and cannot start: too much shared memory, too many registers for the device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fxprec import compat
from fxprec.errors import LoweringError

Compiled = Callable[..., Any]


def named_launches(run: Compiled, kernels: Collection[str], half: str) -> Compiled:
    """Return ``run``, whose ``kernels`` raise a `LoweringError` that names them where they cannot start.

    The step is not run again without the kernel: what ran before it may have written to the model's buffers.
    """
    if not kernels:
        return run

    def call(args: list[Any]) -> Any:
        try:
            return run(args)
        except Exception as error:
            cause = compat.why_not_started(error)
            name = compat.kernel_running(error)
            if cause is None or (name is not None and name not in kernels):  # torch's own
                raise
            raise LoweringError(message(name or f"{', '.join(sorted(kernels)[:3])} or another", half, cause)) from error

    return compat.boxed(call)


def message(kernel: str, half: str, cause: str) -> str:
    """Return the line that a user reads."""
    return (
        f"the generated kernel {kernel} of {half} compiles and cannot start: {cause.rstrip('.')}; compile with "
        "options={'lowering': 'inductor'}, which generates no kernels"
    )
