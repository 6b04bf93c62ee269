"""An item of `gpu.faults`."""

from gpu.faults import passes as check  # noqa: F401
