"""An item of `gpu.faults`."""

from gpu.faults import hangs as check  # noqa: F401
