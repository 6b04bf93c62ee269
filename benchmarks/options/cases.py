"""Cases: a network, options of `torch.compile` and habits of a training loop, drawn by seed as plain data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch.torch_version import TorchVersion

import fxprec
from benchmarks.graphs.check import HARDWARE, NEAR
from benchmarks.options.networks import IMAGES, NETWORKS, TOKENS

Case = Mapping[str, Any]
"""Settings by name; what is left out is the first of its choices."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    "recipe": ("near", "near", "near", "bf16 copies", "fp32", "bf16", "fp16", "fp8", "hfp8", "fp8+int4", "mxfp8", "nvfp4", "bf16-pure"),
    "storage": (None, "packed", "packed", "native", "simulate"),
    "low_ratio": (None, 1.0, 0.5, 0.0),
    "activation_budget": (None, 0.15, 0.3, 0.6, 1.5),  # of what eager float32 saves
    "peak_budget": (None, "95%", "85%", "70%"),
    "step_budget": (None, 0.8, 1.2, 2.0),  # of what an eager step holds
    "policy": ("size", "size-ascending", "random", "uniform", "operator", "operator-io", "exact"),
    "grouping": ("execution", "dataflow"),
    "ways": (None, ("narrow",), ("recompute",), ("narrow", "int4", "recompute"), ("narrow", "int2"), ("offload",)),
    "keep_high": ((), ("0",), ("*",), "ends", (".",), ("body.*", "up"), ("nothing",)),
    "promote_above": (0.01, 1e-6, 1.0, None),
    "grad_scaling": ("auto", "none", "fixed", "dynamic", "histogram", "often", "growing"),
    "accumulator": (None, "1-8-20", "fp32"),
    "lowering": ("eager",),
    "gemms": ("auto", "low", "high"),
    "seed": (0, 3),
    "cpu": (None, "avx2", "avx512+bf16", "portable"),
    "strict": (False, True),
    "watch_every": (None, 1, 2),
    "on_nonfinite": (None, "report", "raise", "ignore"),
    "verify": (False, True),
    "dump": (None, "folder"),
    "dump_tensors": (None, ("*",), ("*:grad_output",)),
    "dump_every": (None, 2),
    "dump_limit": (None, 0),
}  # fmt: skip
LOOP: dict[str, tuple[Any, ...]] = {
    "optimizer": ("torch", "sgd", "adamw float32", "adamw 8bit", "adamw auto", "sgd sums"),
    "in_backward": (False, True),
    "clip": (None, "torch", "exact", "last"),
    "weights": ("float32", "bfloat16"),
    "autocast": (False, True),
    "parts": (1, 2),
    "retain": (False, True),
    "loss_scale": (1.0, 256.0),
    "sizes": ((32,), (32, 24), (16, 32, 8)),
    "dynamic": (False, None, True, "mark"),
    "frozen": (False, True, "until 2", "in turns"),
    "evaluate": (None, "first", "between", "inference", "with gradients"),
    "promote": (False, True),
    "reset": (False, True),
    "save": (False, True),
    "resume": (False, True),
    "replan": (False, True),
    "wrapped": ("module", "in place", "function", "loss"),
    "second": (None, "own", "same", "shared", "tied"),
    "hooks": (None, "gradient", "accumulated", "module", "output"),
    "parametrized": (None, "weight_norm", "spectral_norm"),
    "partly": (False, True),
    "channels_last": (False, True),
    "uneven": (False, True),
    "flight": (None, "in order", "reversed"),
    "between": (False, True),
    "outer": (None, "checkpoint", "reentrant", "on host"),
    "functional": (False, True),
    "input_grad": (False, True),
    "alternate": (False, True),
    "skipped": (False, True),
    "penalty": (False, True),
    "every": (1, 2),
    "zero": ("none", "zeros"),
    "schedule": (False, True),
    "moved": (False, True),
    "copy": (False, True),
}
CHOICES = {
    "network": tuple(NETWORKS),
    **OPTIONS,
    **LOOP,
    "device": ("cpu", "cuda"),
}
"""The device is named, not drawn."""
RARE = {"accumulator", "activation_budget", "peak_budget", "low_ratio", "step_budget", "weights", "retain", "strict"}
BESIDE = ("recipe", "storage", "grad_scaling", "gemms", "lowering", "cpu")
"""Options that a second model takes over."""
OBSERVERS = (
    "watch_every",
    "on_nonfinite",
    "dump",
    "dump_tensors",
    "dump_every",
    "dump_limit",
    "verify",
    "evaluate",
    "save",
    "reset",
    "copy",
    "between",
)
"""Settings that change no number."""

NAMED: dict[str, dict[str, Any]] = {
    "recipe": {"near": NEAR, "bf16 copies": HARDWARE},
    "grad_scaling": {
        "histogram": fxprec.GradScaling(estimate="histogram", interval=2),
        "often": fxprec.GradScaling(interval=1),
        "growing": fxprec.LossScaling(initial=4.0, growth_interval=1),
    },
}
UNITS = {"near": 2.0**-18, "fp32": 2.0**-22, "fp16": 2.0**-10, "bf16": 2.0**-8, "bf16-pure": 2.0**-8, "bf16 copies": 2.0**-8,
         "mxfp8": 2.0**-3, "fp8": 2.0**-3, "hfp8": 2.0**-3, "fp8+int4": 2.0**-2, "nvfp4": 2.0**-2}  # fmt: skip
"""Relative error of the coarsest format that a recipe rounds to."""


def setting(case: Case, name: str) -> Any:
    """Return a setting of a case, or its default."""
    return case.get(name, CHOICES[name][0])


def drawn(pick: random.Random) -> Case:
    """Draw a case in which few or many settings are no defaults, and what it would be refused without, as a rule."""
    case = {"network": pick.choice(CHOICES["network"]), "recipe": pick.choice(CHOICES["recipe"])}
    density = pick.choice((0.08, 0.15, 0.3))
    for name, choices in {**OPTIONS, **LOOP}.items():
        if name not in case and pick.random() < density * (0.5 if name in RARE else 1.0):
            case[name] = pick.choice(choices)
    with_budget = case.keys() & {"peak_budget", "step_budget", "ways"}
    needed = {
        "dump": ("folder", case.keys() & {"dump_tensors", "dump_every", "dump_limit"}),
        "dump_tensors": (("*",), case.keys() & {"dump_every", "dump_limit"}),
        "policy": ("random", "seed" in case),
        "weights": ("bfloat16", case["recipe"] == "bf16-pure"),
        "peak_budget": (pick.choice(OPTIONS["peak_budget"][1:]), with_budget == {"ways"}),
        "storage": ("packed" if case["recipe"] in ("near", "hfp8") else "native", with_budget),
        "in_backward": (True, "step_budget" in case),
        "optimizer": (pick.choice(LOOP["optimizer"][1:]), case.keys() & {"step_budget", "in_backward"}),
    }
    for name, (value, is_needed) in needed.items():
        if is_needed and name not in case and pick.random() < 0.9:
            case[name] = value
    if case.get("in_backward") and case.get("clip") == "torch":
        case["clip"] = "exact"  # torch's clipping reads gradients that backward has used
    for name, is_pointless in _pointless(case).items():
        if is_pointless:
            case.pop(name, None)
    return {name: value for name, value in case.items() if value != CHOICES[name][0] or name in ("network", "recipe")}


def _pointless(case: Case) -> dict[str, bool]:
    """Return for settings whether they contradict others, or do nothing beside them."""
    network, has_tokens = case["network"], case["network"] in TOKENS
    is_called, outer = setting(case, "wrapped") in ("module", "in place"), setting(case, "outer")
    return {
        "channels_last": network not in IMAGES,
        "input_grad": has_tokens,
        "alternate": network not in ("masked", "teacher"),
        "second": case.get("second") == "tied" and network == "down",
        "partly": setting(case, "weights") == "bfloat16" or case.get("second") == "tied",
        "outer": (outer == "reentrant" and (has_tokens or not is_called or not case.get("input_grad")))
        or (outer in ("checkpoint", "reentrant") and "spectral_norm" in case.values())
        or (outer in ("checkpoint", "reentrant") and network == "teacher"),  # which forward writes into, twice
        # Code of torch 2.11 goes on without the gradient of a parameter that is trained later.
        "frozen": case.get("frozen") in ("until 2", "in turns") and TorchVersion(torch.__version__) < (2, 13),
        "flight": not case.keys() & {"parts", "uneven"},
        # The target has the size that is marked, too.
        "dynamic": case.get("dynamic") == "mark" and setting(case, "wrapped") == "loss",
        "functional": not is_called or outer is not None or "parametrized" in case,
        "copy": setting(case, "wrapped") != "module"
        or bool(case.keys() & {"in_backward", "second", "schedule", "dump"}),
    }


def options_of(case: Case, folder: str) -> dict[str, Any]:
    """Return the options of a case; budgets that are shares stay shares."""
    found = {name: setting(case, name) for name in OPTIONS if name in case or name in ("recipe", "lowering")}
    found |= {name: values[found[name]] for name, values in NAMED.items() if found.get(name) in values}
    return found | ({"dump": folder} if found.get("dump") else {})


def unit(case: Case) -> float:
    """Return the relative error that each number of a case may have."""
    of_16_bits = (
        setting(case, "autocast")
        or setting(case, "partly")
        or setting(case, "weights") == "bfloat16"
        or setting(case, "optimizer") == "sgd sums"
    )
    return max(UNITS[setting(case, "recipe")], 2.0**-8 if of_16_bits else 0.0)
