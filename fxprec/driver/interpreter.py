"""Run a graph node by node, for the reference lowering and for calibration.

Inductor replaces ``rand`` by a seed, drawn once in the forward half, and a function of that seed, which backward may
recompute. The prims' own eager implementations ignore the seed, so a recomputed dropout would draw another mask.
`runnable` replaces these implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.profiler import record_function

from fxprec import compat
from fxprec.driver.wrappers import Run
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.analysis.marks import marks
from fxprec.passes.insert_observers import measure
from fxprec.runtime.reference_ops import draw, generator_of


def runnable(gm: GraphModule) -> GraphModule:
    """Replace, in place, operators whose eager implementation is wrong or missing; return ``gm``."""
    replaced = False
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _REPLACED:
            node.target = _REPLACED[node.target]
            replaced = True
    if replaced:
        gm.recompile()
    return gm


def seeded_random(
    size: Sequence[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return float32 numbers, uniform for mode ``"rand"`` and normal for ``"randn"``, the same for the same seed."""
    if mode == "rand":
        return draw(size, seed)  # which lowered graphs draw
    return torch.randn(size, generator=generator_of(seed), device=seed.device, dtype=torch.float32)


def seeded_randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers of [low, high), the same for the same seed."""
    return torch.randint(low, high, size, generator=generator_of(seed), device=seed.device)


def counted_up(
    length: int, *, start: int, step: int, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> torch.Tensor:
    """Return ``start``, ``start + step``, ... in any dtype: `torch.eye` needs uint16, which `torch.arange` lacks."""
    return (torch.arange(length, device=device) * step + start).to(dtype).requires_grad_(requires_grad)


_SEEDED = {compat.SEEDED_RANDOM: seeded_random, compat.SEEDED_RANDINT: seeded_randint}
_REPLACED = {**_SEEDED, torch.ops.prims.iota.default: counted_up}
DRAWN = frozenset(_SEEDED.values())
"""Functions that draw from a seed, in a graph after `runnable`."""


class Calibration:
    """The damage of each counted tensor, measured in the first backward pass.

    Definitions: docs/algorithms.md, "Demotion and promotion".
    """

    def __init__(self) -> None:
        self._tensors: tuple[int, ...] = ()
        self._measured: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a step was measured."""
        return self._measured is not None

    def watch(self, gm: GraphModule) -> Callable[..., Any]:
        """Return one half as a function that also records the damages that its observers measure."""
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
        """Return each counted tensor's damage, or None if not measured. Tensor ``i``'s gradient has id ``i + 1``."""
        if self._measured is None:
            return None
        pairs = zip(self._tensors, self._measured.tolist(), strict=True)
        return {tensor + i: damage for tensor, damages in pairs for i, damage in enumerate(damages)}


def interpreted(gm: GraphModule) -> Callable[..., Any]:
    """Return a function that runs a graph op by op, as the reference lowering."""
    runnable(gm)

    def call(args: list[Any]) -> Any:
        taken = list(args)
        given = {id(t) for x in taken if isinstance(x, torch.Tensor) for t in (x, x._base)}
        args.clear()
        with torch.no_grad():
            return [_own(x, given) for x in gm(*taken)]

    return compat.boxed(call)


def _own(x: object, given: Collection[int]) -> Any:
    """Return a result that a user may write into: autograd must not see it as a view of the graph's own tensor.

    A view of an input stays a view, because autograd counts writes into the tensor that backward reads through it.
    """
    if not isinstance(x, torch.Tensor) or x._base is None or id(x._base) in given:
        return x
    with compat.below_autograd():
        return x.view_as(x)


def interpreted_by_group(gm: GraphModule, run: Run) -> Run:
    """Return a function that calls ``run``; under a profiler it runs ``gm`` in ranges ``fxprec group N`` instead."""

    def call(args: list[Any]) -> Any:
        if not compat.is_profiling():
            return run(args)
        taken = list(args)
        args.clear()
        with torch.no_grad(), ExitStack() as ranges:
            return _ByGroup(gm, ranges).run(*taken)

    return compat.boxed(call)


class _ByGroup(Interpreter):
    """An interpreter that opens a range when the group changes; a node without a group stays in the current range."""

    def __init__(self, gm: GraphModule, ranges: ExitStack) -> None:
        super().__init__(gm)
        self.group: int | None = None
        self.ranges = ranges

    def run_node(self, n: Node) -> Any:
        group = marks(n).group
        if group is not None and group != self.group:
            self.group = group
            self.ranges.close()
            self.ranges.enter_context(record_function(f"fxprec group {group}"))
        return super().run_node(n)
