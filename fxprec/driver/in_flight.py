"""Compiled code and scale table of forwards inside a checkpoint, kept until their recomputation.

A checkpoint around compiled blocks calls them again in backward. That call has to do what the forward did, even where
a promotion or a new scale came between: another forward, of the next micro-batch, may have run since.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxprec import compat


@dataclass(frozen=True)
class Version:
    """What one forward ran."""

    run: Callable[..., Any]
    table: torch.Tensor

    def __call__(self, *args: Any) -> Any:
        return self.run(*args, self.table)


@dataclass
class _Calls:
    """The calls of one graph inside one checkpoint, in order."""

    versions: list[Version] = field(default_factory=list)
    replayed: dict[Hashable, int] = field(default_factory=dict)  # by recomputation: how many of them came by


class InFlight:
    """The calls of one graph by the checkpoint around them; a checkpoint's are forgotten when it dies."""

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[object, _Calls] = WeakKeyDictionary()

    def note(self, version: Version) -> None:
        """Remember what a forward ran, if there is a checkpoint around it."""
        around = compat.checkpoint_around()
        if around is not None and around[1] is None:
            self._calls.setdefault(around[0], _Calls()).versions.append(version)

    def recomputed(self) -> Version | None:
        """Return what the forward ran that the call under way recomputes, or None where that is not known."""
        around = compat.checkpoint_around()
        calls = None if around is None else self._calls.get(around[0])
        if around is None or calls is None:
            return None
        index = calls.replayed.get(around[1], 0)
        calls.replayed[around[1]] = index + 1
        return calls.versions[index] if index < len(calls.versions) else None
