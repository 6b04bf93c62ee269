"""Predict the time of a step whose gradients cross a link in 32, 16 or 8 bits.

The model is that of Dettmers 2016, appendix A. A layer's transfer runs beside the computation that follows, and only
the part that is not hidden costs time. Compressing and decompressing cost a fixed time per number. The paper's own
tables are in `fxprec.runtime.aps.predict_paper`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fxprec.errors import ConfigError
from fxprec.plan.reading import NotNegative, Positive

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default, of float32


@dataclass(frozen=True)
class Link:
    """One rank's link to the others."""

    bytes_per_second: Positive
    latency: NotNegative = 0.0
    """Seconds that a message takes beside its bytes."""

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not self.latency >= 0:
            raise ConfigError(
                f"link of {self.bytes_per_second} bytes/s and {self.latency} s cannot be; give a positive rate and a "
                "latency of at least 0"
            )


@dataclass(frozen=True)
class Coding:
    """How gradients are coded on the link, and what that costs."""

    name: str
    bytes_per_element: float
    ns_per_element: float = 0.0
    """Nanoseconds on one rank to compress and decompress one number, there and back."""
    extra_exchanges: int = 0
    """Small exchanges of one latency before the payload: APS sends its exponents first."""


@dataclass(frozen=True)
class Layer:
    """One layer, in forward order; seconds on one rank."""

    name: str
    elements: int
    """Elements of its gradient."""
    forward: float
    backward: float


@dataclass(frozen=True)
class Prediction:
    """The predicted step with one coding: seconds and bytes of each rank."""

    coding: str
    computation: float
    communication: float
    step: float
    bytes_sent: float
    steps: int
    """Consecutive messages in each exchange."""

    @property
    def exposed(self) -> float:
        """Return the seconds of communication that computation does not hide."""
        return self.step - self.computation


# Measured: benchmarks/results/2026-11-21-aps-codec-speed.json (e5m2, one core; encoded and decoded once a hop).
CODINGS = (
    Coding("32-bit", 4),
    Coding("16-bit", 2, 1.0),
    Coding("8-bit", 1, 4.0, extra_exchanges=1),
)


def exposed(transfer: float, computation: float) -> float:
    """Return the seconds of a transfer that are left when it runs beside a computation."""
    return max(0.0, transfer - computation)


@dataclass(frozen=True)
class Way:
    """The route of an all-reduce over `world_size` ranks, in consecutive steps.

    It is one ring, or groups of `group_size` that each reduce to a master, a ring of masters, and back. Source: Han et
    al. 2020, section 4.2: 2 (p - 1) steps, or 4 (k - 1) + 2 (p / k - 1). There all steps carry the same share, which
    holds at k^2 = p. Here a step inside a group carries 1 / k of the gradient, a step between masters k / p.
    """

    world_size: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        k = self.group_size
        if self.world_size < 1:
            raise ConfigError(f"world size {self.world_size} is not a number of ranks; give at least 1")
        if k is not None and (k < 1 or self.world_size % k):
            raise ConfigError(
                f"group size {k} does not divide {self.world_size} ranks into equal groups; give a divisor of "
                f"{self.world_size}"
            )

    @property
    def legs(self) -> tuple[tuple[int, float], ...]:
        """Return (steps, share of the gradient that each step carries) of each leg of the route."""
        p, k = self.world_size, self.group_size or 1
        return (4 * (k - 1), 1 / k), (2 * (p // k - 1), k / p)

    @property
    def steps(self) -> int:
        """Return the number of all steps."""
        return sum(steps for steps, _ in self.legs)

    @property
    def sent(self) -> float:
        """Return the amount that crosses a master's link in all steps, in units of one gradient."""
        return sum(steps * share for steps, share in self.legs)


def all_reduce_seconds(elements: float, way: Way, link: Link, coding: Coding) -> float:
    """Return the seconds of one all-reduce; an all-to-all and an all-gather send as many bytes as a ring."""
    if way.steps == 0:
        return 0.0
    size = elements * coding.bytes_per_element
    wire = sum(steps * (link.latency + share * size / link.bytes_per_second) for steps, share in way.legs)
    return wire + coding.extra_exchanges * link.latency + elements * coding.ns_per_element * 1e-9


def buckets(layers: Sequence[Layer]) -> list[tuple[float, int]]:
    """Return (seconds from the start of backward until ready, elements) of each bucket, last layers first."""
    found: list[tuple[float, int]] = []
    clock, waiting = 0.0, 0
    for layer in reversed(layers):
        clock += layer.backward
        waiting += layer.elements
        if waiting * 4 >= BUCKET_BYTES:
            found.append((clock, waiting))
            waiting = 0
    if waiting:
        found.append((clock, waiting))
    return found


def predict_step(layers: Sequence[Layer], way: Way, link: Link, coding: Coding) -> Prediction:
    """Predict a data-parallel step whose buckets are exchanged one after another beside the backward pass."""
    forward = sum(layer.forward for layer in layers)
    computation = forward + sum(layer.backward for layer in layers)
    communication, free_at, elements = 0.0, forward, 0
    for ready, count in buckets(layers):
        cost = all_reduce_seconds(count, way, link, coding)
        communication += cost
        elements += count
        free_at = max(free_at, forward + ready) + cost
    sent = way.sent * elements * coding.bytes_per_element
    return Prediction(coding.name, computation, communication, max(computation, free_at), sent, way.steps)


def verdict(predictions: Sequence[Prediction], worthwhile: float = 0.05) -> str:
    """Return one sentence on whether 8 bits pay. A gain under `worthwhile` (5 % of the step) counts as none."""
    best = min(predictions, key=lambda p: p.step)
    plain = predictions[0]
    gain = plain.step / best.step
    if gain < 1 + worthwhile:
        return (
            f"8 bits do not pay here: computation hides {plain.coding} gradients to within {worthwhile:.0%} of a step."
        )
    took = f"{best.step * 1e3:.3g} ms instead of {plain.step * 1e3:.3g}"
    return f"{best.coding} gradients pay: a step takes {took} ({gain:.2f}x)."


_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def parse_rate(text: str) -> float:
    """Return bytes per second of ``"200Mbit/s"``, ``"10Gbit/s"``, ``"6GB/s"``. Raises `ConfigError` for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMG]?)(bit|B)(?:/s|ps)\s*", text)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"link rate {text!r} is not understood; write for instance 200Mbit/s, 10Gbit/s or 6GB/s")
    return float(match[1]) * _UNITS[match[2]] / (8 if match[3] == "bit" else 1)


def parse_seconds(text: str) -> float:
    """Return the seconds of ``"0.2ms"``, ``"5us"``, ``"1.5s"``. Raises `ConfigError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us|ns)\s*", text)
    if match is None:
        raise ConfigError(f"time {text!r} is not understood; write for instance 0.2ms, 5us or 1.5s")
    return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[match[2]]
