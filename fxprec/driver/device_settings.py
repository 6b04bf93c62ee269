"""What a device can follow of the settings."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxprec import compat
from fxprec.config import Settings
from fxprec.driver.event_log import EventLog
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


def place_tensors(device: torch.device, settings: Settings, log: EventLog) -> None:
    """Give CPU tensors the allocator that the settings ask for; tell of what was asked for and cannot be."""
    asked = settings.asked
    if asked.allocator == "system":
        _process.has_asked_for_system = True
        if compact.is_installed():
            log.notice(Notice("allocator='system'", f"{_COMPACT_ALREADY}; {_APART}"))
    elif settings.is_compact and device.type == "cpu":
        _install_compact(settings, log)
    elif asked.allocator == "compact":
        why = f"it is for CPUs; on {device.type} torch's own allocator keeps blocks together"
        log.notice(Notice("allocator='compact'", f"{why}; set PYTORCH_CUDA_ALLOC_CONF instead"))


def _install_compact(settings: Settings, log: EventLog) -> None:
    if compact.is_installed():
        return
    why = compact.install()
    if why is not None:
        log.notice(Notice("allocator='compact'", f"{why}; resident memory may be more than what is live"))
        return
    cause = "" if settings.asked.allocator else " (for peak_budget)"
    log.note("allocator", "allocator='compact'", f"holds new CPU tensors of 16 KiB and more of this process{cause}")
    if _process.has_asked_for_system:
        log.warn_once("allocator='compact'", f"{_SYSTEM_BEFORE}; {_APART}")


class _Process:
    has_asked_for_system = False
    """Whether a model asked for torch's own allocator by name."""


_process = _Process()
_COMPACT_ALREADY = (
    "not in force: this process has the compact allocator already, which a model with allocator='compact' or a "
    "peak_budget brought"
)
_SYSTEM_BEFORE = "holds the tensors of a model with allocator='system' too from now on: a process has one allocator"
_APART = "give the models one allocator, or train them in processes of their own"
