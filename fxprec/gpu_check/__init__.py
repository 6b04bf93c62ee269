"""``fxprec gpu-check``: what a GPU's owner runs first (docs/gpu.md).

`items` is the list; each item has a module here with ``check(ground)``, run in a process of its own (`run`, `host`).
"""
