"""The list of checks, in order. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fxprec.errors import ConfigError, did_you_mean

Mode = Literal["gpu", "interpreted", "compiled"]
"""On the GPU; without a GPU, Triton's kernels in its interpreter on the CPU, or their compilation ahead of time."""

_ROOM = "fxprec.gpu_check"


@dataclass(frozen=True)
class Item:
    """One check, run in a process of its own."""

    name: str
    title: str
    module: str
    """The module with ``check(ground)``, and with ``compile_ahead(ground)`` if ``compiles``."""
    compiles: bool = False
    """Whether a dry run compiles the item's kernels ahead of time."""

    def modes(self, *, dry: bool) -> tuple[Mode, ...]:
        """Return the modes in which the item runs; each mode is a process."""
        if not dry:
            return ("gpu",)
        return ("interpreted", "compiled") if self.compiles else ("interpreted",)


ITEMS = (
    Item("machine", "GPU, driver and versions", f"{_ROOM}.machine"),
    Item("casts", "codes, transposes, counts", f"{_ROOM}.casts", compiles=True),
    Item("products", "GEMMs over codes", f"{_ROOM}.products", compiles=True),
    Item("kernels", "generated, optimizer, arith, APS", f"{_ROOM}.kernels", compiles=True),
    Item("transformer", "a transformer, each lowering", f"{_ROOM}.transformer"),
    Item("promotion", "promotion; two equal runs", f"{_ROOM}.promotion"),
    Item("cuda-graphs", "CUDA graphs", f"{_ROOM}.cuda_graphs"),
    Item("peak-budget", "peak budgets as allocated", f"{_ROOM}.budgets"),
    Item("warm-start", "a second process, warm caches", f"{_ROOM}.warm_start"),
    Item("step-time", "step time beside autocast", f"{_ROOM}.step_time"),
    Item("second-gpu", "a second GPU; DDP with APS", f"{_ROOM}.second_gpu"),
)


def chosen(names: Sequence[str], items: Sequence[Item] = ITEMS) -> tuple[Item, ...]:
    """Return the named items in the list's order; without names, all. Raises `ConfigError` for an unknown name."""
    known = [item.name for item in items]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only: unknown {name!r}{did_you_mean(name, known)}; allowed: {', '.join(known)}")
    return tuple(item for item in items if not names or item.name in names)
