"""An item of `gpu.faults`."""

from gpu.faults import wrong_code as check  # noqa: F401
