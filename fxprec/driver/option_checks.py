"""Compare the options with the device, with the process and with other ranks, and warn of conflicts."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from fxprec import compat
from fxprec.config import Config, Settings
from fxprec.config.contradictions import storage_in_force
from fxprec.config.recipes import find_recipe
from fxprec.driver.event_log import EventLog
from fxprec.driver.saved_state import Identity
from fxprec.errors import ConfigError, FxprecWarning, PlanError
from fxprec.passes.analysis.operators import source_of
from fxprec.passes.notice import readable
from fxprec.plan import Plan
from fxprec.plan.lines import place
from fxprec.runtime.cpu import compact

LOCAL = frozenset(name for name in vars(Config) if name.startswith("dump"))  # options that may differ between ranks
MOST = 64  # ranks whose options rank 0 compares


def following(config: Config, plan: Plan) -> Config:
    """Return the options under which a plan file is followed: its recipe and its storage where none are given.

    A recipe equal to the default counts as not given.
    """
    if config.recipe == Config.recipe:
        config = replace(config, recipe=plan.recipe)
    same = storage_in_force(config, find_recipe(config.recipe)) == plan.storage
    return config if config.storage is not None or same else replace(config, storage=plan.storage)


def want_whole_graphs(settings: Settings) -> None:
    """Turn off Dynamo's DDP optimizer, with a warning, if an option concerns the whole graph.

    The optimizer cuts the graph at DDP's buckets. fxprec plans each piece by itself, and a piece's gradients are sent
    before the next piece's backward runs. Raises `compat.TraceAgain`, so that Dynamo traces again without it.
    """
    whole = [name for name in ("plan", "peak_budget", "activation_budget") if getattr(settings.asked, name) is not None]
    if not whole or not compat.widen_ddp_buckets():
        return
    warnings.warn(
        f"Dynamo's DDP optimizer is off for this graph: it splits graphs at DDP's buckets, and {whole[0]} is about "
        f"the whole graph; gradients are exchanged after the compiled backward pass. Leave {whole[0]} out, or compile "
        "by layer (fxprec.integrations.compile_layers) before DDP, so that buckets leave early; or set "
        "torch._dynamo.config.optimize_ddp = False to say so yourself",
        FxprecWarning,
        stacklevel=2,
    )
    raise compat.TraceAgain("fxprec plans whole graphs")


def tell_of_new_versions(log: EventLog) -> None:
    """Warn once per backend of versions newer than tested. It is no error under ``strict``, as most things work."""
    for line in compat.newer_than_tried():
        if log.note("untried", log.name, line):
            log.warn(line)


_OF_ROUNDING = ("low_ratio", "activation_budget")
_OF_PLANNED_GRAPHS = ("plan", "dump", "dump_tensors", "watch_every", "verify", "on_nonfinite", "allocator")


def tell_of_no_effect(settings: Settings, log: EventLog, *, is_planned: bool, given: Plan | None = None) -> None:
    """Warn of options that have no effect; under ``strict`` raises `FallbackError`.

    ``is_planned``: False if plain Inductor compiles the graph. ``given``: the plan file that is followed.
    """
    asked = settings.asked
    if given is not None and set(given.recipe.formats) != set(settings.recipe.formats):
        log.warn_of_loss(
            f"recipe={settings.recipe.name!r} is not that of the plan given, {given.recipe.name!r}: the plan's formats "
            "are followed, and all else is decided by the recipe, so other tensors are saved than the plan says; leave "
            "recipe out, or drop plan= to plan again"
        )
    if not settings.rounds_anything:
        why = (
            f"recipe {settings.recipe.name!r} holds everything in float32; choose a recipe with a low format, such as "
            "'fp8', or leave it out"
        )
        names = _OF_ROUNDING if is_planned else (*_OF_ROUNDING, *_OF_PLANNED_GRAPHS)
        without_effect = [n for n in names if getattr(asked, n) and getattr(asked, n) not in ("system", "ignore")]
    else:
        why = "the plan given says what is low; leave one of them out, or edit the plan"
        chosen = {f.name: f.default for f in fields(asked) if f.name in ("policy", "keep_high", "seed")}
        without_effect = [n for n, default in chosen.items() if asked.plan and getattr(asked, n) != default]
    for name in without_effect:
        log.warn_of_loss(f"{name}={getattr(asked, name)!r} has no effect: {why}")


def tell_of_gradients_within(gm: GraphModule, log: EventLog) -> None:
    """Warn if the captured graph contains a backward, of `torch.func.grad` or `backward()`, which no plan covers."""
    node = next(compat.gradients_within(gm.graph), None)
    if node is not None:
        is_call = node.target is torch.autograd.grad  # of the user; that of torch.func.grad is a line of torch's
        log.tell(
            place("torch.autograd.grad", source_of(node)) if is_call else "torch.func.grad",
            "its backward is in the same graph as its forward, and a plan decides what is held between two graphs: "
            "nothing that this backward reads is narrowed or recomputed; call backward() on what the compiled "
            "model returns",
        )


def settings_on(device: torch.device, settings: Settings, log: EventLog, *, plans_only: bool) -> Settings:
    """Return the settings that are in force on a device, and warn of requests that it cannot fulfil.

    ``plans_only``: the run makes plans only and executes nothing, so this machine's memory does not matter.
    """
    held = _without_cuda_graphs(device, _in_storage_of(device, settings, log), log)
    asked = held.asked
    if asked.cpu is not None and device.type != "cpu":
        log.tell(f"cpu={asked.cpu!r}", f"it has no effect: the model is on {device.type}; leave it out")
    _place_tensors(device, held, log)
    budget, most = None if held.peak_budget is None else held.peak_budget.asked, _memory(device)
    if not plans_only and isinstance(budget, int) and most is not None and budget > most:
        less = "give it less than that, or a share of the step's peak such as '60%'"
        log.tell(f"peak_budget {readable(budget)}", f"{device.type} has {readable(most)}; {less}")
    return held


def _in_storage_of(device: torch.device, settings: Settings, log: EventLog) -> Settings:
    """Return settings in a storage that the device supports: packed, with a warning, if it has no 8-bit dtypes."""
    has_8_bits = any(fmt.bits <= 8 for fmt in settings.recipe.formats)
    reason = compat.no_native_fp8(device) if settings.storage == "native" and has_8_bits else None
    if reason is None:
        return settings
    detail = f"{reason}; stored as packed codes instead: the same numbers and bytes, cast in integer arithmetic"
    log.tell("storage='native'", detail)
    return replace(settings, storage="packed")


_WITHOUT_CUDA_GRAPHS: dict[str, Literal["default", "max-autotune-no-cudagraphs"]] = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}


def _without_cuda_graphs(device: torch.device, settings: Settings, log: EventLog) -> Settings:
    """Return settings whose mode records no CUDA graphs on a CPU, and warn if nothing of the mode is left.

    For CUDA graphs Inductor moves a CPU's kernels behind each other once more, after their buffers are planned.
    """
    mode = settings.asked.mode
    if device.type != "cpu" or mode not in _WITHOUT_CUDA_GRAPHS:
        return settings
    left = _WITHOUT_CUDA_GRAPHS[mode]
    if left == "default":
        why = f"mode={mode!r} has no effect: it records CUDA graphs, and the model is on a CPU; leave it out"
        log.tell("mode", why)
    return replace(settings, asked=replace(settings.asked, mode=left))


def refuse_offload(device: torch.device, settings: Settings, given: Plan | None) -> None:
    """Raise `ConfigError` or `PlanError` if saved tensors are to be offloaded to the host but the device is a CPU."""
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


def _memory(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has, or None if unknown."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _place_tensors(device: torch.device, settings: Settings, log: EventLog) -> None:
    """Install the CPU allocator that the settings need; warn if a requested allocator cannot be had."""
    asked = settings.asked
    if asked.allocator == "system":
        _process.has_asked_for_system = True
        if compact.is_installed():
            log.tell("allocator='system'", f"{_COMPACT_ALREADY}; {_APART}")
    elif settings.wants_compact_allocator and device.type == "cpu":
        _install_compact(settings, log)
    elif asked.allocator == "compact":
        why = f"it is for CPUs; on {device.type} torch's own allocator keeps blocks together"
        log.tell("allocator='compact'", f"{why}; set PYTORCH_CUDA_ALLOC_CONF instead")


def _install_compact(settings: Settings, log: EventLog) -> None:
    if compact.is_installed():
        return
    why = compact.install()
    if why is not None:
        log.tell("allocator='compact'", f"{why}; resident memory may exceed the bytes of live tensors")
        return
    cause = "" if settings.asked.allocator else " (for peak_budget)"
    log.note("allocator", "allocator='compact'", f"allocates this process's new CPU tensors of 16 KiB or more{cause}")
    if _process.has_asked_for_system:
        log.warn_once("allocator='compact'", f"{_SYSTEM_BEFORE}; {_APART}")


class _Process:
    has_asked_for_system = False
    """Whether a model of this process was compiled with allocator='system'."""


_process = _Process()
_COMPACT_ALREADY = (
    "has no effect: an earlier model with allocator='compact' or a peak_budget has already installed the compact "
    "allocator in this process"
)
_SYSTEM_BEFORE = (
    "from now on also allocates the tensors of a model with allocator='system': a process has one allocator"
)
_APART = "give the models one allocator, or train them in processes of their own"


def tell_of_other_options(config: Config, identity: Identity, log: EventLog) -> None:
    """Warn if a rank that compiled this model before has other options; under ``strict`` raise `FallbackError`.

    Each rank writes its options to the process group's store when it compiles, and compares those already there. No
    rank waits for another, so a rank that compiles later or never blocks none.
    """
    group = compat.process_group_store()
    if group is None or not identity.is_training:
        return
    rank, world, store = group
    key, own = f"fxprec/{json.dumps(identity.parameters)}", _options(config)

    def left_by(other: int) -> list[dict[str, Any]]:
        """Return the options that a rank wrote for models with these parameter names; there may be several."""
        name = f"{key}/{other}"
        return json.loads(store.get(name)) if store.check([name]) else []

    store.set(f"{key}/{rank}", json.dumps([*left_by(rank), own]))
    for other in range(1, min(world, MOST)) if rank == 0 else (0,):
        found = left_by(other)
        if found and own not in found:
            log.tell("options", _difference(rank, own, other, found[-1]))
            return


def _options(config: Config) -> dict[str, Any]:
    """Return the options as data, with the plan's text in place of its path, which may differ between machines."""
    options = {name: value for name, value in config.to_dict().items() if name not in LOCAL}
    if config.plan is not None:
        options["plan"] = Path(config.plan).read_text(encoding="utf-8")
    return options


def _difference(rank: int, own: Mapping[str, Any], other: int, found: Mapping[str, Any]) -> str:
    name = next(name for name in own if own[name] != found.get(name))
    values = "other contents" if name == "plan" else f"{_short(own[name])} here and {_short(found.get(name))} there"
    return (
        f"rank {rank} compiles this model with other options than rank {other}: {name} has {values}; ranks that train "
        "one model should round alike: give all of them the same options"
    )


def _short(value: object) -> str:
    value = value.get("name", value) if isinstance(value, dict) else value
    return repr(value)[:60]
