"""Run a graph with the reference lowering of its plan for a while, and record what its halves compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fxprec.driver.compilation import compile_graph
from fxprec.driver.lowering import Lowering
from fxprec.errors import LoweringError

if TYPE_CHECKING:
    from fxprec.driver.graph import PlannedGraph
    from fxprec.driver.record import Recorder


@contextmanager
def recorded(graph: PlannedGraph, recorder: Recorder) -> Iterator[None]:
    """Run a graph with the reference lowering of its plan inside the context, and let ``recorder`` see it.

    Training steps count as usual. Raises what compiling raises, and `LoweringError` if the reference lowering has other
    scales, or if there is no plan yet.
    """
    controller, compiler = graph.controller, graph.compiler
    if controller is None:
        raise LoweringError(f"{compiler.log.name} is being calibrated and has no plan; run a step before this")
    asked = replace(compiler.settings.asked, lowering="eager", mode="default", verify=False)
    reference = replace(
        compiler,
        settings=replace(compiler.settings, asked=asked),
        lowering=Lowering(asked, graph.captured.device, compiler.log.notice),
        dump=None,
        recorder=recorder,
        tensors=None,
        numerics=None,
    )
    seen = compile_graph(reference, graph.captured, controller.plan, controller.step)
    scales = controller.scales
    if seen.scales != scales or seen.capacity != graph.captured.capacity:
        raise LoweringError(f"{compiler.log.name}: the reference lowering of its plan carries other scales")
    with graph.running(replace(seen, plan=controller.plan)):
        yield
