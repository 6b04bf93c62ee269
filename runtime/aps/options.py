"""Options of the gradient exchange: validated, and comparable between ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from fxprec.errors import ConfigError, did_you_mean

Accumulate = Literal["fp32", "format", "kahan"]
Rounding = Literal["nearest", "stochastic"]
Scaling = Literal["aps", "none", "raw"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "accumulate": get_args(Accumulate),
    "rounding": get_args(Rounding),
    "scaling": get_args(Scaling),
}


@dataclass(frozen=True, kw_only=True)
class APSOptions:
    """Options of `APSState`; every rank must hold equal ones. Raises `ConfigError` for a value out of range."""

    format: str = "e5m2"
    """Name of a number format of at most 16 bits, or of an 8-bit codec."""
    accumulate: Accumulate = "fp32"
    """``fp32``: two roundings in all, whatever the world size. ``format``: every partial sum is rounded to the wire
    format, in ring order. ``kahan``: the same, with a compensation kept in the format."""
    group_size: int | None = None
    """Ranks per group of the hierarchical all-reduce (``format`` and ``kahan`` only); None is one ring of all."""
    rounding: Rounding = "nearest"
    """``stochastic`` is seeded by (seed, step, bucket, rank); what arrives is the same on all ranks."""
    error_feedback: bool = False
    """Add to the next step's gradient what this rank's rounding lost in this one: of its gradients, and with
    ``accumulate='fp32'`` also of the sums it owns."""
    high_steps: int = 0
    """Steps at the start that go in the gradients' own dtype (the paper's hybrid precision)."""
    high_epochs: int = 0
    """The same in epochs; tell them with `APSState.set_epoch`."""
    scaling: Scaling = "aps"
    """``none`` sends what the paper sends without APS: gradients divided by the number of ranks and not scaled, as
    PyTorch's fp16 hook does. ``raw``: not divided either, as the paper's emulator does; with ``accumulate='format'``
    and an IEEE format, whose overflow is inf, what the paper compares with. Only for showing what APS is worth."""
    seed: int = 0
    """Seed of stochastic rounding."""

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            _check_choice(field, getattr(self, field), allowed)
        for field in ("high_steps", "high_epochs", "seed"):
            _check_count(field, getattr(self, field), 0)
        if self.error_feedback and self.scaling != "aps":
            raise ConfigError(
                f"APS error_feedback=True has no use with scaling={self.scaling!r}, which shows what plain rounding "
                "does; use scaling='aps', or leave error_feedback out"
            )
        if self.group_size is not None:
            _check_count("group_size", self.group_size, 1)
            if self.accumulate == "fp32":
                raise ConfigError(
                    f"group_size={self.group_size} has no use with accumulate='fp32', whose error does not grow with "
                    "the ranks; use accumulate='format' or 'kahan', or leave group_size out"
                )

    def text(self) -> str:
        """Return all fields in one line, the same on every rank that chose the same."""
        return ", ".join(f"{field}={value!r}" for field, value in asdict(self).items())


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ConfigError(f"APS {field}={value!r} is unknown{hint}; use one of {list(allowed)}")


def _check_count(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"APS {field}={value!r} must be an integer of at least {least}")
