"""What a device can follow of the settings."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxprec import compat
from fxprec.config import Settings
from fxprec.errors import ConfigError, PlanError
from fxprec.passes.notice import Notice
from fxprec.plan import Plan
from fxprec.runtime.cpu import compact


def on_device(device: torch.device, settings: Settings) -> tuple[Settings, Notice | None]:
    """Return settings that the device can follow: packed where its code has no 8-bit dtypes; and what to tell."""
    has_8_bits = any(fmt.bits <= 8 for fmt in settings.recipe.formats)
    reason = compat.no_native_fp8(device) if settings.storage == "native" and has_8_bits else None
    if reason is None:
        return settings, None
    detail = f"{reason}; stored as packed codes instead: the same numbers and bytes, cast in integer arithmetic"
    return replace(settings, storage="packed"), Notice("storage='native'", detail)


def refuse_offload(device: torch.device, settings: Settings, given: Plan | None) -> None:
    """Raise `ConfigError` or `PlanError` where saved tensors are to wait in host memory, and never are elsewhere."""
    if device.type != "cpu":
        return
    if settings.peak_budget is not None and "offload" in settings.ways:
        raise ConfigError(
            "ways has 'offload', which moves saved tensors to host memory, and a model on a CPU has them there; leave "
            "it out, or move the model to a GPU"
        )
    moved = next((s for s in (given.sites if given is not None else ()) if s.way == "offload"), None)
    if moved is not None or (given is not None and given.peak_bytes is not None and given.peak_bytes.offloaded):
        where = f"sites[{moved.id}].way ({moved.tensor})" if moved is not None else "peak_bytes.offloaded"
        raise PlanError(
            f"{where} of the given plan says 'offload', to host memory, and a model on a CPU has it there; give it the "
            "way 'keep', plan again, or move the model to a GPU"
        )


def unused_processor(device: torch.device, settings: Settings) -> Notice | None:
    """Say that the option ``cpu`` has no effect on a model that is elsewhere."""
    if settings.asked.cpu is None or device.type == "cpu":
        return None
    return Notice(f"cpu={settings.asked.cpu!r}", f"it has no effect: the model is on {device.type}; leave it out")


def place_tensors(device: torch.device, settings: Settings) -> Notice | None:
    """Have CPU tensors lie where the settings say; say why not, where they cannot and somebody counts on it."""
    asked = settings.asked
    if not settings.is_compact or (device.type != "cpu" and asked.allocator is None):
        return None
    if device.type == "cpu":
        why, left = compact.install(), "resident memory may be more than what is live"
    else:
        why = f"it is for CPUs; on {device.type} torch's own allocator keeps blocks together"
        left = "set PYTORCH_CUDA_ALLOC_CONF instead"
    if why is None or (asked.allocator is None and asked.peak_budget is None):
        return None
    return Notice("allocator='compact'", f"{why}; {left}")
