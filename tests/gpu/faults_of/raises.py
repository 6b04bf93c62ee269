"""An item of `gpu.faults`."""

from gpu.faults import raises as check  # noqa: F401
