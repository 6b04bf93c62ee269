"""Events of a training run: promotions, scale changes, fallbacks."""

from __future__ import annotations

from dataclasses import dataclass


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
