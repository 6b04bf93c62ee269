"""What backward passes do with a graph's forwards: recompute them in checkpoints, and read copies of their inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxprec import compat
from fxprec.errors import DoubleBackwardError, ModifiedInPlaceError
from fxprec.passes.analysis.inputs import GraphInput


class Steps:
    """Tells a graph's forwards from recomputations.

    A reentrant checkpoint runs its forward without gradients, in another graph. All calls of the graph that trains are
    then recomputations, and each backward pass that has one is a step. Where that other graph is compiled too, its
    forwards settle what statistics ask for.
    """

    def __init__(self) -> None:
        self.runs_forward = False
        """Whether the graph was called outside of backward."""
        self._settles_in_forward = False
        self._backward_id = -1

    def settle_in_forward(self) -> bool:
        """A forward of the model begins, of another graph: say whether it is this one's time to settle too."""
        self._settles_in_forward = self._settles_in_forward or not self.runs_forward
        return not self.runs_forward

    def settle_in_backward(self) -> bool:
        """A call inside a backward pass begins: say whether it is the first of that pass, and settles."""
        is_first = not self._settles_in_forward and self._backward_id != compat.backward_id()
        self._backward_id = compat.backward_id()
        return is_first


@dataclass(frozen=True)
class Version:
    """What one forward ran."""

    run: Callable[..., Any]
    table: torch.Tensor

    def __call__(self, *args: object) -> Any:
        """Run the backward half on its arguments and the scale table."""
        return self.run(*args, self.table)


@dataclass
class _Calls:
    """The calls of one graph inside one checkpoint, in order."""

    versions: list[Version] = field(default_factory=list)
    replayed: dict[Hashable, int] = field(default_factory=dict)  # by recomputation: how many of them came by


class InFlight:
    """What forwards inside a checkpoint ran, by the checkpoint, until it dies.

    A checkpoint around compiled blocks calls them again in backward. That call has to do what the forward did, even
    where a promotion or a new scale came between: another forward, of the next micro-batch, may have run since.
    """

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


class Versions:
    """The versions of inputs that one forward saw, checked once in each backward pass: 0.45 us a tensor and step.

    Autograd compares the versions of the tensors it saved. The version of a stored copy stays, even where the tensor
    that it was made from is written in place. So the same comparison is made here.
    """

    def __init__(self, positions: Sequence[int], inputs: Sequence[GraphInput], args: Sequence[object]) -> None:
        self._inputs = inputs
        self._seen: list[tuple[int, weakref.ref[torch.Tensor], int]] = []
        for i in positions:
            tensor = args[i]
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():  # such has no version
                self._seen.append((i, weakref.ref(tensor), tensor._version))
        self._checked = -1  # number of the backward pass

    def check(self) -> None:
        """Raise `ModifiedInPlaceError` where a tensor has been written since."""
        if self._checked == compat.backward_id():
            return
        for i, reference, version in self._seen:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise ModifiedInPlaceError(_message(self._inputs[i], version, tensor._version))
        self._checked = compat.backward_id()


def check_backward(results: object, versions: Versions) -> None:
    """Raise `DoubleBackwardError` and `ModifiedInPlaceError` before backward runs, where the cause is in sight."""

    def check(grad: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "backward(create_graph=True) went into a graph compiled by fxprec, and compiled graphs have no second "
                "derivatives; leave create_graph out, or run this part of the model uncompiled (torch.compiler.disable)"
            )
        versions.check()

    for result in results if isinstance(results, list | tuple) else [results]:
        if isinstance(result, torch.Tensor) and result.requires_grad:
            compat.on_gradient(result, check)


def _message(known: GraphInput, before: int, now: int) -> str:
    what = "parameter" if known.kind == "param" else "input"
    return (
        f"{what} {known.name} was modified in place after the forward pass (version {before}, now {now}), and this "
        "backward pass reads the copy that forward stored; call backward() before optimizer.step() and the like, or "
        "run the forward pass again"
    )
