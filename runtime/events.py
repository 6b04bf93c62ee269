"""Record the events of a training run: promotions, scale changes, fallbacks."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field

from fxprec.errors import FxprecWarning

log = logging.getLogger(__name__)
_LEVELS = {"scale": logging.DEBUG}  # scales change throughout training; other events are logged at INFO
_WARNED = frozenset({"clamp", "nan", "nonfinite"})  # kinds that also warn, once per graph
MAX_EVENTS = 10_000  # scales change throughout training; beyond this, the oldest event that is no promotion is dropped


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run, with the step and the site it concerns.

    Kinds of compiling are "fallback", "relowering", "replanned" (a plan exceeds its budget as compiled), "unplanned" (a
    graph left as it is), "uncompiled" (code that Dynamo leaves to Python), "machine" (the processor lacks an
    instruction), "allocator" (the process uses another from now on) and "untried" (torch or Triton is newer than this
    release knows). Kinds of training are "promotion", "nonfinite" and "nan" (an inf or a NaN of the forward pass was
    stored as a number), "left-range" (the first tensor that left its range), "relinked" (a layer's gradient is sent in
    other bits, because the link has changed) and "alert" (a tensor breaks a rule of the user's). ``watch_every`` adds
    "biased" (a rounding is off on average) and "logit-growth" (attention's logits grow). Kinds of scales are "scale" (a
    scale changed), "unscaled" (what steps without measured scales lost) and "clamp" (float32 cannot hold the scale that
    is needed).
    """

    step: int
    kind: str
    site: str
    detail: str


@dataclass
class RunEvents:
    """The events of one graph while it trains. Each event is logged; the first of each harmful kind also warns."""

    events: list[Event] = field(default_factory=list)
    _alerting: set[tuple[str, str]] = field(default_factory=set)
    _warned: set[str] = field(default_factory=set)

    def tell(self, event: Event, advice: str = "") -> None:
        """Keep and log an event. If the kind of event warns, ``advice`` ends the warning."""
        log.log(
            _LEVELS.get(event.kind, logging.INFO),
            "step %d: %s of %s: %s",
            event.step,
            event.kind,
            event.site,
            event.detail,
        )
        self.events.append(event)
        if event.kind in _WARNED and event.kind not in self._warned:
            self._warned.add(event.kind)
            message = "; ".join(filter(None, (f"{event.site}: {event.detail}", advice)))
            warnings.warn(message, FxprecWarning, stacklevel=3)
        if len(self.events) > MAX_EVENTS:
            del self.events[next((i for i, e in enumerate(self.events) if e.kind != "promotion"), 0)]

    def alert(self, step: int, site: str, rule: str, detail: str | None) -> None:
        """Record that a site breaks a rule, once until a call with ``detail`` None reports that the site keeps it."""
        key = (site, rule)
        if detail is not None and key not in self._alerting:
            self.tell(Event(step, "alert", site, detail))
        (self._alerting.discard if detail is None else self._alerting.add)(key)
