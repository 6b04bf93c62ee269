"""An item of `gpu.faults`."""

from gpu.faults import crashes as check  # noqa: F401
