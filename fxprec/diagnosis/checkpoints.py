"""Sensitivity over a run, from its saved states: which modules became fragile, and when."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxprec.diagnosis.adjoint import combined
from fxprec.diagnosis.doctor import doctor
from fxprec.errors import ConfigError
from fxprec.plan.lines import aligned

FRAGILE = 3.0  # times the damage at the first checkpoint
SHOWN = 12
_WRAPPED = ("model", "state_dict", "model_state_dict")


@dataclass(frozen=True)
class Course:
    """Damage of storing each module's tensors as planned, at each checkpoint."""

    checkpoints: tuple[str, ...]
    damages: Mapping[str, tuple[float, ...]]
    """Damages by module, one per checkpoint."""

    def fragile_since(self, module: str) -> str | None:
        """Return the first checkpoint at which a module's damage exceeds three times its damage at the first one."""
        first, *later = self.damages[module]
        found = (name for name, damage in zip(self.checkpoints[1:], later, strict=True) if damage > FRAGILE * first)
        return next(found, None)

    def __str__(self) -> str:
        worst = sorted(self.damages, key=lambda module: -max(self.damages[module]))
        lines: list[tuple[str, ...]] = [("module", *self.checkpoints, "fragile since")]
        for module in worst[:SHOWN]:
            cells = (f"{damage:.2g}" for damage in self.damages[module])
            lines.append((module or "(no module)", *cells, self.fragile_since(module) or ""))
        more = f"\n... and {len(worst) - SHOWN} more" if len(worst) > SHOWN else ""
        return f"Damage by module and checkpoint\n{aligned(lines)}{more}"


def over_checkpoints(
    model: nn.Module,
    args: object,
    pattern: str,
    *,
    loss: Callable[[Any], object] | None = None,
    options: Mapping[str, object] | None = None,
    tell: Callable[[str], None] = print,
) -> Course:
    """Examine the model at each checkpoint whose path matches, in the order of the numbers in their names.

    Raises `ConfigError` for a pattern that matches nothing, and for a file without the model's state.
    """
    paths = sorted(map(Path, glob.glob(pattern)), key=_by_number)
    if not paths:
        raise ConfigError(f"--checkpoint {pattern!r} matches no file; give a pattern such as 'run/step-*.pt'")
    found: list[dict[str, float]] = []
    for path in paths:
        _load(model, path)
        diagnosis = doctor(model, args, loss=loss, options={**(options or {}), "reruns": 0, "formats": ("bf16",)})
        by_module: dict[str, list[float]] = {}
        for row in diagnosis.ranking:
            by_module.setdefault(row.module, []).append(row.damage)
        found.append({module: combined(damages) for module, damages in by_module.items()})
        tell(f"{path.name}: loss {diagnosis.loss:.6g}")
    modules = dict.fromkeys(module for damages in found for module in damages)
    return Course(
        tuple(path.stem for path in paths), {m: tuple(damages.get(m, 0.0) for damages in found) for m in modules}
    )


def _by_number(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in re.findall(r"\d+", path.name)], path.name


def _load(model: nn.Module, path: Path) -> None:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever pickle or zipfile says of it
        raise ConfigError(
            f"{path}: cannot be read as a checkpoint: {type(error).__name__}; save a state_dict"
        ) from None
    inner = next((state[name] for name in _WRAPPED if isinstance(state, dict) and name in state), state)
    try:
        model.load_state_dict(inner)
    except (RuntimeError, TypeError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise ConfigError(
            f"{path}: is not a state of {type(model).__name__}: {lines[min(1, len(lines) - 1)]}"
        ) from None
