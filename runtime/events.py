"""Events of a training run: promotions, scale changes, fallbacks."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field

from fxprec.errors import FxprecWarning

log = logging.getLogger(__name__)
_LEVELS = {"scale": logging.DEBUG}  # as long as training runs; what happens once is told at INFO
_WARNED = frozenset({"clamp", "nan", "nonfinite"})  # once each
MAX_EVENTS = 10_000  # scales change as long as training runs; the oldest are forgotten, promotions never


@dataclass(frozen=True, slots=True)
class Event:
    """One thing worth telling.

    ``kind`` is "promotion", "fallback", "relowering", "replanned" (a plan that holds more than its budget as compiled),
    "unplanned" (a graph left as it is), "uncompiled" (code Dynamo leaves to Python), "machine" (the processor lacks an
    instruction), "allocator" (the process has another from now on) or "untried" (a torch or Triton newer than this
    release knows); "nonfinite" or "nan" where an inf or a NaN of the forward pass was stored as a number, "left-range"
    for the tensor that was the first to leave its range; "relinked" for a layer whose gradient goes in other bits on a
    link that has changed; "biased" for a rounding that is off on average and "logit-growth" for attention whose logits
    grow, of ``watch_every``; of gradients' scales "scale" (changed), "unscaled" (what the
    first step lost, whose scales are not measured yet) or "clamp" (float32 cannot hold the scale wanted).
    """

    step: int
    kind: str
    site: str
    detail: str


@dataclass
class RunEvents:
    """What one graph told of while it trained: each is logged, and what harms a run is warned of, once a kind."""

    events: list[Event] = field(default_factory=list)
    _alerting: set[tuple[str, str]] = field(default_factory=set)
    _warned: set[str] = field(default_factory=set)

    def tell(self, event: Event, advice: str = "") -> None:
        """Keep an event; ``advice`` ends its warning, where its kind has one."""
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
        """Tell that a site breaks a rule, once until it does not any more (``detail`` None)."""
        key = (site, rule)
        if detail is not None and key not in self._alerting:
            self.tell(Event(step, "alert", site, detail))
        (self._alerting.discard if detail is None else self._alerting.add)(key)
