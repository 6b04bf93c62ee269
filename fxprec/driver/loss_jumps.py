"""Telling of a jump of the loss: the first tensor, in the order of execution, that moved."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fxprec.driver.event_log import EventLog
from fxprec.errors import FxprecWarning, NonfiniteError
from fxprec.runtime.controller import Controller, describe
from fxprec.runtime.losses import Jump
from fxprec.runtime.nonfinite import Departure

_NOBODY = "no stored tensor moved; look at the batch and the learning rate, or watch more with on_nonfinite='report'"


def tell_of_jump(jump: Jump, controllers: Sequence[Controller], log: EventLog, action: str | None) -> None:
    """Note a ``"loss-jump"`` event, warn for ``"report"``. Raises `NonfiniteError` for ``"raise"``."""
    found = first_that_moved(jump, controllers)
    if found is None:
        site, message = "loss", f"{jump}; {_NOBODY}"
    else:
        controller, departure = found
        controller.departures.append(departure)
        site, message = describe(departure.site), departure.detail
    log.note("loss-jump", site, message, step=jump.step)
    message = message if found is None else f"{site} {message}"
    if action == "raise":
        raise NonfiniteError(f"{message}; check the batch, or set on_nonfinite='report' to go on")
    if action == "report":
        warnings.warn(message, FxprecWarning, stacklevel=3)


def first_that_moved(jump: Jump, controllers: Sequence[Controller]) -> tuple[Controller, Departure] | None:
    """Return who moved first, over all graphs: by step, then by execution, backward of the last graph first."""
    found = []
    for i, controller in enumerate(controllers):
        if controller.nonfinite is None:
            continue
        sites = {row: controller.site_of(row) for row in controller.nonfinite.watch.series()}
        departure = controller.nonfinite.watch.first_moved(jump.step, sites, str(jump))
        if departure is not None:
            in_backward, place = departure.site.order
            found.append(((departure.step, in_backward, -i if in_backward else i, place), controller, departure))
    if not found:
        return None
    _, controller, departure = min(found, key=lambda f: f[0])
    return controller, departure
