"""An item of `gpu.faults`."""

from gpu.faults import skips as check  # noqa: F401
