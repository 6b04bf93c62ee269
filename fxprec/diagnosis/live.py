"""A running training to examine: its own graphs, plan and scales, during one or a few of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fxprec.config import Config
from fxprec.config.checks import options_of
from fxprec.diagnosis.subject import Subject
from fxprec.driver.backend import Backend
from fxprec.driver.named import find_backend
from fxprec.driver.record import Recorder
from fxprec.errors import ConfigError

OWN = ("formats", "tolerance", "reruns", "high_share")
"""The options that a diagnosis of a running backend accepts."""


@dataclass(frozen=True)
class Live:
    """A backend that trains, and a function that runs a step of it."""

    backend: Backend
    name: str
    step: Callable[[], object]

    @classmethod
    def of(cls, given: object, args: object, loss: object) -> Live | None:
        """Return the running training; None for a module that is not compiled or has not trained yet.

        ``args`` is a function that runs a step, or for a compiled model a batch. Raises `ConfigError`.
        """
        backend = given if isinstance(given, Backend) else find_backend(given)
        if backend is None:
            return None
        is_step = callable(args) and not isinstance(args, Tensor)
        if is_step and loss is not None:
            raise ConfigError("loss has no effect with a function that runs the step and its own loss; leave it out")
        if is_step:
            name = type(getattr(given, "_orig_mod", given)).__name__
            return cls(backend, "running backend" if isinstance(given, Backend) else name, args)  # type: ignore[arg-type]
        if isinstance(given, Backend):
            raise ConfigError(
                f"args is {type(args).__name__}; with a Backend give a function that runs one or a few training steps"
            )
        if not backend.training_graphs():
            return None
        subject = Subject.of(getattr(given, "_orig_mod", given), args, loss)
        return cls(backend, subject.name, lambda: _left_as_it_was(subject, given, backend))

    def own_options(self, options: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the backend's options and those of the diagnosis. Raises `ConfigError` for other options."""
        given = options_of(options, f"of {', '.join(OWN)}")
        foreign = [name for name in given if name not in OWN]
        if foreign:
            raise ConfigError(
                f"{foreign[0]!r} is not an option for a running backend, whose own options stay in force; give it "
                f"{', '.join(OWN)}, or examine the module itself"
            )
        return {**_compiled_with(self.backend), **given}

    def record(self) -> tuple[float, Recorder]:
        """Run the step; return the loss, NaN if the step returned none, and the recording. Raises `ConfigError`."""
        recorder = Recorder(copies=True)
        with self.backend.recording(recorder) as graphs:
            if not graphs:
                raise ConfigError(f"{self.name} has compiled no training graph yet; let it train a step, then ask")
            value = self.step()
        return _number(value), recorder


def not_trained_yet(model: object, options: object) -> tuple[object, Any]:
    """Return the module and merged options of a compiled model that has not run yet; otherwise both as given."""
    backend = find_backend(model)
    if backend is None or not (options is None or isinstance(options, Mapping)):
        return model, options
    return getattr(model, "_orig_mod", model), {**_compiled_with(backend), **(options or {})}


def _compiled_with(backend: Backend) -> dict[str, object]:
    """Return the options that a backend was made with, without those that equal the default."""
    plain = Config()
    given = {f.name: getattr(backend.config, f.name) for f in fields(plain)}
    return {name: value for name, value in given.items() if value != getattr(plain, name)}


def _number(value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    return float(value) if isinstance(value, int | float) else float("nan")


def _left_as_it_was(subject: Subject, call: Any, backend: Backend) -> float:
    """Run a batch through the compiled model, and restore gradients, buffers and the backend's state."""
    with _kept(subject.model), backend.unnoticed():
        return subject.step(call)


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, was in buffers:
                buffer.copy_(was)
