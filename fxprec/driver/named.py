"""Register backends by name, such as ``backend="fxprec"``, and find the `Backend` of a compiled model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from fxprec import compat
from fxprec.config import Config
from fxprec.driver.backend import Backend
from fxprec.driver.uncompiled import WATCH, Watched, called_by
from fxprec.errors import ConfigError, FxprecError


def backend_of(compiled: object) -> Backend:
    """Return the backend of what ``torch.compile(..., backend="fxprec")`` returned, or of a module compiled in place.

    The backend exists before the first call, so a saved state can be loaded then. Raises `ConfigError` if ``compiled``
    was compiled by another backend, or not at all.
    """
    found = find_backend(compiled)
    if found is None:
        raise ConfigError(
            f"{type(compiled).__name__} was not compiled by fxprec; give backend_of what "
            'torch.compile(model, backend="fxprec") returned (a copy of a module compiled in place is uncompiled: call '
            "its compile() again)"
        )
    return found


def find_backend(compiled: object) -> Backend | None:
    """Return the backend as `backend_of` does, or None if fxprec did not compile ``compiled``."""
    return called_by(compat.wrapper_of(compiled))


class _NamedBackend(Watched):
    """The backend registered as ``"fxprec"``, or under a name that stands for a set of options.

    Options are the fields of `Config`. Options given to ``torch.compile`` override those of the name.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.options = name, dict(options)

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        wrapper = compat.calling_wrapper()
        try:
            backend = self.made(options, mode) if wrapper is None else self.backend_of(wrapper)
        except FxprecError as error:
            raise compat.through_dynamo(error) from error
        return backend(gm, example_inputs)

    def backend_of(self, wrapper: object) -> Backend:
        found = getattr(wrapper, "fxprec_backend", None)
        if found is None:
            given: Mapping[str, Any] = wrapper.kwargs  # type: ignore[attr-defined]
            found = self.made(given.get("options"), given.get("mode"))
            wrapper.fxprec_backend = found  # type: ignore[attr-defined]
        return found

    def made(self, options: Mapping[str, Any] | None, mode: str | None) -> Backend:
        """Return a backend for ``torch.compile``'s arguments; optimizer and step budget are not in its config."""
        given = {**self.options, **(options or {})}
        optimizer, budget = given.pop("optimizer", None), given.pop("step_budget", None)
        config = Config.from_options(given if mode is None else {**given, "mode": mode})
        return Backend(config, optimizer=optimizer, step_budget=budget)

    def reset(self) -> None:
        """Reset the backend of the calling wrapper; ``torch.compiler.reset()`` calls this."""
        wrapper = compat.calling_wrapper()
        found: Backend | None = getattr(wrapper, "fxprec_backend", None)
        if found is not None:
            found.reset()

    # Dynamo reuses the graphs of one torch.compile() for another one with an equal backend and equal options. In
    # fxprec each compiled model has its own plans and scales, so no two backends may compare equal.
    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        # One backend exists per name, so copies and pickles of a compiled model store the name.
        return "fxprec" if self is _FXPREC else (register_backend, (self.name, self.options))


_FXPREC = _NamedBackend("fxprec", {})
_REGISTERED: dict[str, _NamedBackend] = {}


def __getattr__(name: str) -> Any:
    """Return the backend that torch's entry point names."""
    if name != "fxprec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if compat.is_looking_up_a_backend():
        WATCH.begin()
        compat.one_at_a_time("fxprec")
    return _FXPREC


def register_backend(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Make ``torch.compile(model, backend=name)`` compile with fxprec and these options; return that backend.

    Use it for tools that take a backend's name and no options. Registering the same options again changes nothing.
    Raises `ConfigError` for a wrong option, and for a name that is already registered for something else.
    """
    Config.from_options(options)
    known = _REGISTERED.get(name)
    if known is not None and known.options == dict(options):
        return known
    if known is not None or not compat.name_backend(made := _NamedBackend(name, options), name):
        raise ConfigError(f"backend {name!r} is registered already, for something else; choose another name")
    WATCH.begin()
    _REGISTERED[name] = made
    return made
