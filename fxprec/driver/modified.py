"""Parameters and inputs written in place between forward and backward: autograd cannot see it where a copy is saved.

Autograd compares the versions of the tensors it saved. Of a low copy it finds the version unchanged, while the tensor
it was made from is another by now, so the same comparison is made here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fxprec import compat
from fxprec.errors import DoubleBackwardError, ModifiedInPlaceError
from fxprec.passes.analysis.inputs import GraphInput


class Versions:
    """The versions one forward saw, checked once in each backward pass: 0.45 us a tensor and step."""

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


def check_backward(results: Any, versions: Versions) -> None:
    """Raise `DoubleBackwardError` and `ModifiedInPlaceError` before backward runs, where the cause is in sight."""

    def check(grad: torch.Tensor) -> None:
        _check_grad_mode(grad)
        versions.check()

    for result in results if isinstance(results, list | tuple) else [results]:
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.register_hook(check)


def _check_grad_mode(grad: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "backward(create_graph=True) went into a graph compiled by fxprec, and compiled graphs have no second "
            "derivatives; leave create_graph out, or run this part of the model uncompiled (torch.compiler.disable)"
        )


def _message(known: GraphInput, before: int, now: int) -> str:
    what = "parameter" if known.kind == "param" else "input"
    return (
        f"{what} {known.name} was modified in place after the forward pass (version {before}, now {now}), and this "
        "backward pass reads the copy that forward stored; call backward() before optimizer.step() and the like, or "
        "run the forward pass again"
    )
