"""Record the events of a graph or of a backend once, and warn of requests that were not fulfilled."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from fxprec.errors import FallbackError, FxprecWarning
from fxprec.passes.notice import Notice
from fxprec.runtime.events import Event

log = logging.getLogger(__name__)
Said: TypeAlias = tuple[str, str, str]
"""Kind, site and detail of an event."""


class EventLog:
    """The events of a graph or backend, in order. Under ``strict`` a request that is not fulfilled is an error."""

    def __init__(self, name: str, *, strict: bool) -> None:
        self.events: list[Event] = []
        self.name, self._strict = name, strict
        self._heard: list[Said] | None = None

    @contextmanager
    def heard(self) -> Iterator[list[Said]]:
        """Collect the events that are noted inside the context, including events already known."""
        found: list[Said] = []
        before, self._heard = self._heard, found
        try:
            yield found
        finally:
            self._heard = before

    def repeat(self, said: Iterable[Said], step: int) -> None:
        """Note and tell again what `heard` collected in another process. Raises `FallbackError` under ``strict``."""
        for kind, site, detail in said:
            if kind == "fallback":
                self.tell(site, detail, step=step)
            else:
                self.note(kind, site, detail, step=step)

    def note(self, kind: str, site: str, detail: str, *, step: int = 0) -> bool:
        """Record an event unless it is known, since re-lowering finds the same again. Return whether it is new."""
        event = Event(step, kind, site, detail)
        if self._heard is not None:
            self._heard.append((kind, site, detail))
        if event in self.events:
            return False
        log.info("%s: %s", self.name, detail if site == self.name else f"{kind}: {site}: {detail}")
        self.events.append(event)
        return True

    def tell(self, site: str, detail: str, *, step: int = 0) -> None:
        """Warn of a request that was not fulfilled, and record it. Raises `FallbackError` under ``strict``."""
        if self._strict or self.note("fallback", site, detail, step=step):
            self.warn_of_loss(f"{site}: {detail}")

    def notice(self, notice: Notice, *, step: int = 0) -> None:
        """Warn of a notice and record it, as `tell` does. Raises `FallbackError` under ``strict``."""
        self.tell(notice.site, notice.detail, step=step)

    def warn_once(self, site: str, detail: str, *, step: int = 0) -> None:
        """Warn of a limit and record it, once whatever the step. It is no error, even under ``strict``."""
        if not any(e.site == site and e.kind == "limit" for e in self.events):
            self.note("limit", site, detail, step=step)
            self.warn(f"{site}: {detail}")

    def warn_of_loss(self, message: str) -> None:
        """Warn of a request that was not fulfilled, without an event. Raises `FallbackError` under ``strict``."""
        if self._strict:
            raise FallbackError(message)
        self.warn(message)

    def warn(self, message: str) -> None:
        """Warn, whether or not ``strict``."""
        warn_user(message)


def warn_user(message: str) -> None:
    """Warn at the user's line: the innermost line outside of fxprec and of torch, which calls fxprec to compile."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    known = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, FxprecWarning, frame.f_code.co_filename, frame.f_lineno, name, known)


_NOT_THE_USERS = ("fxprec", "torch", "contextlib", "functools", "")  # "": torch generates code without a module name
