"""Whose parameters a graph is called with: that tells equal layers apart. It keeps neither them nor a model alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Parameter

from fxprec import compat
from fxprec.passes.analysis.inputs import GraphInput


class Parameters:
    """The parameters of one layer, by name."""

    def __init__(self, names: Mapping[int, str], args: Sequence[Any]) -> None:
        self._names = names
        self._own: dict[int, Callable[[], Parameter | None]] = {
            i: _ref(args[i]) for i in names if isinstance(args[i], Parameter)
        }

    @staticmethod
    def names_of(inputs: Sequence[GraphInput]) -> dict[int, str]:
        """Return the names of a graph's parameters by position among its arguments."""
        return {i: known.name for i, known in enumerate(inputs) if known.kind == "param"}

    def may_be(self, args: Sequence[Any]) -> bool:
        """Say whether the layer may be called with ``args``: none of its parameters that live is another one there.

        New parameters in place of dead ones are taken for the layer's from then on.
        """
        dead = []
        for i, own in self._own.items():
            if args[i] is own() or isinstance(args[i], compat.FakeTensor):
                continue
            if own() is not None and isinstance(args[i], Parameter):
                return False
            dead.append(i)
        for i in dead:
            if isinstance(args[i], Parameter):
                self._own[i] = _ref(args[i])
        return True

    def of_another(self, other: Parameters) -> bool:
        """Say whether both have a name in common under which another parameter is: they are of two layers."""
        mine, theirs = self._by_name(), other._by_name()
        return any(mine[name] is not theirs[name] for name in mine.keys() & theirs.keys())

    def _by_name(self) -> dict[str, Parameter]:
        return {self._names[i]: own for i, ref in self._own.items() if (own := ref()) is not None}


def _ref(parameter: Parameter) -> Callable[[], Parameter | None]:
    """Refer to a parameter; to none where Dynamo's DDP optimizer hands in a fake one: the first that comes is it."""
    return _none if isinstance(parameter, compat.FakeTensor) else weakref.ref(parameter)


def _none() -> None:
    return None
