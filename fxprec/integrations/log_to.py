"""`log_to`: a callback for training loops that logs statistics, alerts and jumps of the loss."""

from __future__ import annotations

from collections.abc import Iterable

from fxprec.config.checks import integer
from fxprec.driver.backend import Backend
from fxprec.integrations.alerts import alerts_of
from fxprec.integrations.backends import backends_in
from fxprec.integrations.statistics import check_target, log_rows


class LogTo:
    """A callback to call after each step with the model, and with the loss to report its jumps; see `log_to`."""

    def __init__(self, to: object, every: int, alerts: Iterable[object], *, every_tensor: bool) -> None:
        check_target(to)
        self._to, self._every_tensor = to, every_tensor
        self._every = integer("every", every, least=1)
        self._alerts = alerts_of(alerts)
        self._calls = 0
        self._seen: tuple[object, dict[str, Backend]] | None = None  # cached: finding backends walks all modules

    def __call__(self, model: object, loss: object = None, *, step: int | None = None) -> None:
        """Count a training step, and log every ``every``-th step.

        ``model`` is a compiled model, or a module with compiled parts. ``loss``, a number or a tensor of one element,
        is watched for jumps. ``step`` replaces the count. Raises `ConfigError` for a model that fxprec did not compile.
        """
        self._calls += 1
        step = self._calls if step is None else step
        if self._seen is None or self._seen[0] is not model:
            self._seen = (model, backends_in(model))
        backends = self._seen[1]
        if loss is not None:
            for backend in backends.values():
                backend.note_loss(loss)
        if step % self._every == 0:
            log_rows(backends, self._to, step, every_tensor=self._every_tensor, alerts=self._alerts)


def log_to(to: object, every: int = 100, *, alerts: Iterable[object] = (), every_tensor: bool = False) -> LogTo:
    """Return a callback that logs a model's statistics every ``every`` steps, without waiting for the device.

    ``log = fxprec.log_to(writer, every=100)``, then ``log(model, loss)`` after each step. ``to`` and ``every_tensor``
    are those of `log_statistics`; with ``to`` None nothing is logged. ``alerts`` are pairs of a tensor pattern and a
    rule, such as ``("layers.*:output", "overflow_ratio > 0.01")``; they become ``"alert"`` events. If the loss (tensor
    or number) jumps, it is reported as ``on_nonfinite`` says, with the first tensor that moved. Raises `ConfigError`.
    """
    return LogTo(to, every, alerts, every_tensor=every_tensor)
