"""An item of `gpu.faults`."""

from gpu.faults import last as check  # noqa: F401
