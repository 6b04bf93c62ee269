"""``fxprec gpu-check``: the first command that the owner of a GPU runs (docs/gpu.md).

`items` is the list; each item has a module here with ``check(ground)``, run in a process of its own (`run`, `host`).
"""
