"""Notices that one compiled graph serves several models: Dynamo shares code between equal layers of one backend."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.nn import Parameter

from fxprec.passes.analysis.joint import GraphInput
from fxprec.passes.base import Notice


class ParameterWatch:
    """The parameters a graph was first called with. Neither they nor their model are kept alive."""

    def __init__(self, inputs: Sequence[GraphInput]) -> None:
        self._names = {i: known.name for i, known in enumerate(inputs) if known.kind == "param"}
        self._first: dict[int, weakref.ref[Parameter]] | None = None

    def strangers(self, args: Sequence[Any]) -> Notice | None:
        """Return what to tell where other parameters come in while the first ones still live."""
        if self._first is None:
            self._first = {i: weakref.ref(args[i]) for i in self._names if isinstance(args[i], Parameter)}
            return None
        for i, first in self._first.items():
            if args[i] is not first() is not None and isinstance(args[i], Parameter):
                return Notice(self._names[i], _SHARED)
        return None


_SHARED = (
    "another layer or model runs the same compiled code with parameters of its own, so that both share one plan, one "
    "table of scales and one count of steps, and an overflow in one promotes the tensors of all; give each a backend "
    'of its own: layer.compile(backend="fxprec") for each, or torch.compile with a Backend for each'
)
