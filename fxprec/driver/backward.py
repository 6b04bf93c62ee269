"""Match a backward pass to its forward: recompute checkpoints with the same code, and detect modified inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxprec import compat
from fxprec.driver.compiled import Compiled
from fxprec.errors import DoubleBackwardError, ModifiedInPlaceError
from fxprec.passes.analysis.inputs import GraphInput


@dataclass(frozen=True)
class Version:
    """The code and the scale table of one forward; without them the graph as it was captured."""

    run: Callable[..., Any]
    table: torch.Tensor | None = None
    compiled: Compiled | None = None

    def __call__(self, *args: object) -> Any:
        """Run the code on the graph's arguments and the scale table."""
        return self.run(*args) if self.table is None else self.run(*args, self.table)


@dataclass
class _Calls:
    """The calls of one graph inside one checkpoint, in order."""

    versions: list[Version] = field(default_factory=list)
    replayed: dict[Hashable, int] = field(default_factory=dict)  # by recomputation: number of calls repeated so far


class InFlight:
    """The versions that forwards inside a checkpoint ran, by checkpoint, until the checkpoint is freed.

    A checkpoint around compiled blocks calls them again in backward. That call must run the code and scales of its
    forward. A forward of the next micro-batch may have promoted a tensor or changed a scale since.
    """

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[object, _Calls] = WeakKeyDictionary()

    def note(self, version: Version) -> None:
        """Record the version that a forward runs, if the forward is inside a checkpoint."""
        around = compat.checkpoint_around()
        if around is not None and around[1] is None:
            self._calls.setdefault(around[0], _Calls()).versions.append(version)

    def recomputed(self) -> Version | None:
        """Return the version of the forward that the current call recomputes, or None if that is not known."""
        around = compat.checkpoint_around()
        calls = None if around is None else self._calls.get(around[0])
        if around is None or calls is None:
            return None
        index = calls.replayed.get(around[1], 0)
        calls.replayed[around[1]] = index + 1
        return calls.versions[index] if index < len(calls.versions) else None


class InputVersions:
    """The autograd versions of one forward's inputs, checked once in each backward pass (0.45 us per tensor and step).

    Autograd compares the versions of the tensors that it saved. A stored copy keeps its version even if the tensor
    that it was made from is modified in place. So fxprec compares the versions of those tensors itself.
    """

    def __init__(self, positions: Sequence[int], inputs: Sequence[GraphInput], args: Sequence[object]) -> None:
        self._inputs = inputs
        self._seen: list[tuple[int, weakref.ref[torch.Tensor], int]] = []
        for i in positions:
            tensor = args[i]
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():  # inference tensors have no version
                self._seen.append((i, weakref.ref(tensor), tensor._version))

    def check(self) -> None:
        """Raise `DoubleBackwardError` under ``create_graph``, or `ModifiedInPlaceError` for a tensor modified since."""
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "backward(create_graph=True) went into a graph compiled by fxprec, and compiled graphs have no second "
                "derivatives; leave create_graph out, or run this part of the model uncompiled (torch.compiler.disable)"
            )
        for i, reference, version in self._seen:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise ModifiedInPlaceError(_message(self._inputs[i], version, tensor._version))


def before_backward(results: object, check: Callable[[], None]) -> None:
    """Call ``check`` once in each backward pass into a graph with these results, before the graph's backward runs."""
    seen = -1

    def hook(grad: torch.Tensor) -> None:
        nonlocal seen
        if seen != compat.backward_id():
            check()
            seen = compat.backward_id()

    for result in results if isinstance(results, list | tuple) else [results]:
        if isinstance(result, torch.Tensor) and result.requires_grad:
            compat.on_gradient(result, hook)


def _message(known: GraphInput, before: int, now: int) -> str:
    what = "parameter" if known.kind == "param" else "input"
    return (
        f"{what} {known.name} was modified in place after the forward pass (version {before}, now {now}), and this "
        "backward pass reads the copy that forward stored; call backward() before optimizer.step() and the like, or "
        "run the forward pass again"
    )
