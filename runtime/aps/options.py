"""Define the options of the gradient exchange: validated, and comparable between ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from fxprec.config.checks import above_zero, integer, one_of
from fxprec.errors import ConfigError
from fxprec.runtime.aps.link_plan import BITS
from fxprec.runtime.aps.links import Links, parse_links

Accumulate = Literal["fp32", "format", "kahan"]
Rounding = Literal["nearest", "stochastic"]
Scaling = Literal["aps", "none", "raw"]
Bits = Literal["by format", "by link"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "accumulate": get_args(Accumulate),
    "rounding": get_args(Rounding),
    "scaling": get_args(Scaling),
    "bits": get_args(Bits),
}
_OF_LINK = ("bits", "link", "error_budget", "widths", "low_rank")


@dataclass(frozen=True, kw_only=True)
class APSOptions:
    """Options of `APSState`, which must be equal on all ranks. Raises `ConfigError` for a value out of range."""

    format: str = "e5m2"
    """Name of a number format of at most 16 bits, or of an 8-bit codec."""
    accumulate: Accumulate = "fp32"
    """``fp32``: two roundings in all, whatever the world size. ``format``: every partial sum is rounded to the wire
    format, in ring order. ``kahan``: the same, with a compensation kept in the format."""
    group_size: int | None = None
    """Ranks of a node. With ``fp32`` gradients go in 16 bits inside a node and in codes between nodes; with ``by link``
    the plan says which layers do. With ``format`` and ``kahan``: ranks per group of the paper's hierarchical
    all-reduce. None is one ring of all ranks."""
    rounding: Rounding = "nearest"
    """``stochastic`` is seeded by (seed, step, bucket, part, rank); all ranks receive the same values."""
    error_feedback: bool = False
    """Add to the next step's gradient what this rank's rounding lost in this step: of its gradients, and with
    ``accumulate='fp32'`` also of the sums that it owns."""
    high_steps: int = 0
    """Number of first steps that send gradients in their own dtype (the paper's hybrid precision)."""
    high_epochs: int = 0
    """The same in epochs, which `APSState.set_epoch` sets."""
    scaling: Scaling = "aps"
    """``none`` sends what the paper sends without APS: gradients divided by the number of ranks and not scaled, as
    PyTorch's fp16 hook does. ``raw`` does not divide either, as the paper's emulator; with ``accumulate='format'`` and
    an IEEE format, whose overflow is inf, this is the paper's baseline. Both only serve to show what APS is worth."""
    seed: int = 0
    """Seed of stochastic rounding, and of the rotation of block formats."""
    bits: Bits = "by format"
    """``by link``: each layer is sent in the bits that end the step soonest; `format` is the format of 8 bits."""
    link: str | None = None
    """With ``by link``: the rate, as ``200Mbit/s`` or ``200Mbit/s, 1ms``; with `group_size` both rates, as
    ``50Mbit/s, 1ms between; 2Gbit/s inside``: a node's to the others, and a rank's inside its node. None measures the
    links, and follows their changes."""
    error_budget: float = 1 / 32
    """With ``by link``: the squared error that rounding may add to the mean gradient, as a share of the squared norm of
    one rank's gradient. 1/32 lets all layers go in 4 bits."""
    widths: tuple[int, ...] = (32, 16, 8, 4)
    """With ``by link``: the bits to choose from; 32 is the gradient's own dtype."""
    low_rank: int = 0
    """With ``by link``: columns of the two matrices that a layer may be sent as, in 16 bits and always with error
    feedback (PowerSGD), such as 4. 0 turns low rank off."""

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            one_of(f"APS {field}", getattr(self, field), allowed)
        for field in ("high_steps", "high_epochs", "seed", "low_rank"):
            integer(f"APS {field}", getattr(self, field), least=0)
        if self.error_feedback and self.scaling != "aps":
            raise ConfigError(
                f"APS error_feedback=True has no effect with scaling={self.scaling!r}, which shows what plain rounding "
                "does; use scaling='aps', or leave error_feedback out"
            )
        if self.group_size is not None:
            integer("APS group_size", self.group_size, least=1)
        self._check_link()

    def _check_link(self) -> None:
        if self.bits != "by link":
            changed = [f for f in _OF_LINK[1:] if getattr(self, f) != getattr(type(self), f)]
            if changed:
                raise ConfigError(
                    f"APS {changed[0]}= applies only with bits='by link'; add bits='by link', or leave {changed[0]}= "
                    "out"
                )
            return
        above_zero("APS error_budget", self.error_budget, "a positive share, such as 1/32")
        if not isinstance(self.widths, tuple | list) or set(self.widths) - set(BITS) or 16 not in self.widths:
            raise ConfigError(f"APS widths={self.widths!r} must be some of {BITS}, 16 among them")
        if self.accumulate != "fp32" or self.scaling != "aps":
            raise ConfigError("APS bits='by link' adds in float32 and scales layers; leave accumulate and scaling out")
        if not isinstance(self.link, str | None):
            raise ConfigError(f"APS link is {self.link!r}; give it text, such as '200Mbit/s, 1ms', or None")
        self.given_links()

    def given_links(self, has_nodes: bool = True) -> Links | None:
        """Return the given links, or None; for one node, the link inside of it. Raises `ConfigError` for other text.

        `has_nodes`: whether there are several nodes of `group_size` ranks.
        """
        found = None if self.link is None else parse_links(self.link, self.group_size)
        return found if has_nodes or found is None or found.inside is None else Links(found.inside)

    def text(self) -> str:
        """Return the options in force in one line, the same on every rank with the same options.

        Saved states contain the line. Without ``low_rank`` it equals the line of earlier versions.
        """
        unused = () if self.bits == "by link" else _OF_LINK
        unused = unused if self.low_rank else (*unused, "low_rank")
        return ", ".join(f"{field}={value!r}" for field, value in asdict(self).items() if field not in unused)
