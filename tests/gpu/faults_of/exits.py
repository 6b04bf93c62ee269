"""An item of `gpu.faults`."""

from gpu.faults import exits as check  # noqa: F401
