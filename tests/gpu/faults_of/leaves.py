"""An item of `gpu.faults`."""

from gpu.faults import leaves as check  # noqa: F401
