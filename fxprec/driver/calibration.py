"""One calibration step for policy ``exact``: run the graph as written, and measure what rounding would cost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import GraphModule

from fxprec import compat
from fxprec.driver.seeded import draw_from_seeds
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.insert_observers import measure


class Calibration:
    """Damages by counted tensor, from the first backward that arrives.

    Definitions: docs/algorithms.md, "Demotion and promotion".
    """

    def __init__(self) -> None:
        self._tensors: tuple[int, ...] = ()
        self._measured: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        return self._measured is not None

    def watch(self, gm: GraphModule) -> Callable[..., Any]:
        """Return the partitioned graph as a function that also records the damages it measures."""
        num_outputs = len(results_of(gm.graph))
        tensors = measure(gm)
        run = interpreted(gm)
        if not tensors:
            return run
        self._tensors = tensors
        compat.trim_output_strides(num_outputs)

        def call(args: list[Any]) -> Any:
            *results, damages = run(args)
            if self._measured is None:
                self._measured = damages.view(-1, 2).cpu()
            return tuple(results)

        return compat.boxed(call)

    def by_tensor(self) -> dict[int, float] | None:
        """Return the damage of each counted tensor, once measured: the gradient of tensor ``i`` is ``i + 1``."""
        if self._measured is None:
            return None
        found: dict[int, float] = {}
        for tensor, (value, gradient) in zip(self._tensors, self._measured.tolist(), strict=True):
            found[tensor] = value
            found[tensor + 1] = gradient
        return found


def interpreted(gm: GraphModule) -> Callable[..., Any]:
    """Run a graph op by op: the reference lowering."""
    draw_from_seeds(gm)

    def call(args: list[Any]) -> Any:
        taken = list(args)
        given = {id(t) for x in taken if isinstance(x, torch.Tensor) for t in (x, x._base)}
        args.clear()
        with torch.no_grad():
            return [_own(x, given) for x in gm(*taken)]

    return compat.boxed(call)


def _own(x: Any, given: Collection[int]) -> Any:
    """Return a result that is no view of the graph's own tensors to a user, who may write into it.

    A view of what was given stays one: autograd counts writes into the tensor that backward reads through it.
    """
    if not isinstance(x, torch.Tensor) or x._base is None or id(x._base) in given:
        return x
    with compat.below_autograd():
        return x.view_as(x)
