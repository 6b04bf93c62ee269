"""Watch the halves of a graph as they run: `Recorder` keeps a step for `fxprec.doctor`, `TensorDump` writes tensors.

For ``dump_tensors``, an input or result of a half is the value of the compiled code itself. A tensor inside the half is
recomputed from the half's inputs by the reference lowering, in every n-th step. All other steps run unchanged, and do
not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxprec import compat
from fxprec.compat import copied
from fxprec.config import Settings
from fxprec.driver.compiled import Compiled
from fxprec.driver.event_log import EventLog
from fxprec.driver.interpreter import runnable
from fxprec.driver.wrappers import Run
from fxprec.ir.symbolic import Quantize
from fxprec.passes.analysis.dumped_tensors import dumped_in
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.passes.analysis.joint import numel_hint, results_of
from fxprec.passes.analysis.marks import marks
from fxprec.passes.analysis.ops import MUTATIONS
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.plan import Site
from fxprec.report.folder import GraphDump
from fxprec.report.tensors import Dumped, Origin
from fxprec.runtime.controller import Controller

EVERY = 100  # default of dump_every: one step in so many is written
LIMIT = 2**30  # default of dump_limit: bytes that a step may write


@dataclass
class RecordedHalf:
    """One half of a partitioned graph, with symbolic casts. ``args``: arguments of its last run; None before one."""

    gm: GraphModule
    compiled: Compiled
    args: tuple[Any, ...] | None = None


@dataclass
class Recorder:
    """The halves of each graph's latest compilation, by graph (``graph 0``) and ``"forward"`` or ``"backward"``."""

    graphs: dict[str, dict[str, RecordedHalf]] = field(default_factory=dict)
    inputs: dict[str, tuple[GraphInput, ...]] = field(default_factory=dict)
    """Inputs of each graph, in the order of forward's arguments."""
    copies: bool = False
    """Whether arguments are copied, because an optimizer modifies the weights before the arguments are read."""

    def watch(self, graph: str, half: str, recorded: RecordedHalf, run: Run) -> Run:
        """Wrap ``run``, so that ``recorded`` keeps its arguments."""
        self.graphs.setdefault(graph, {})[half] = recorded

        def call(args: list[Any]) -> Any:
            recorded.args = tuple(a.detach().clone() if self.copies and isinstance(a, Tensor) else a for a in args)
            return run(args)

        return compat.boxed(call)


class EveryNth:
    """A filter for the first run of each half in every n-th step, from the first on. Checkpoints run forward again.

    ``controller`` returns the graph's controller, or None before the graph has a plan.
    """

    def __init__(self, every: int, controller: Callable[[], Controller | None]) -> None:
        self._every, self._controller = every, controller
        self._seen: set[tuple[int, str]] = set()

    def __call__(self, half: str) -> Controller | None:
        """Return the graph's controller if the half that runs now should be watched, else None."""
        controller = self._controller()
        step = 0 if controller is None else controller.step
        if step < 1 or (step - 1) % self._every or (step, half) in self._seen:
            return None
        self._seen = {(s, h) for s, h in self._seen if s == step} | {(step, half)}
        return controller


@dataclass
class TensorDump:
    """Watcher that writes one graph's tensors to its dump folder in every n-th step."""

    settings: Settings
    folder: GraphDump
    log: EventLog
    controller: Callable[[], Controller | None]
    """Returns the graph's controller, or None before the graph has a plan."""

    def __post_init__(self) -> None:
        self._due = EveryNth(self.settings.asked.dump_every or EVERY, self.controller)
        self._asked: frozenset[CountedTensor] = frozenset()
        self._in_forward: frozenset[CountedTensor] = frozenset()

    def expect(self, graph: Graph) -> None:
        """Record which tensors are marked in the joint graph, before Inductor simplifies the graph."""
        self._asked, self._in_forward = frozenset(t for _, t in dumped_in(graph)), frozenset()

    def watch(self, graph: str, half: str, recorded: RecordedHalf, run: Run) -> Run:
        """Wrap ``run``, so that the marked tensors of the half are written in every n-th step."""
        found = {tensor: node for node, tensor in dumped_in(recorded.gm.graph) if tensor not in self._in_forward}
        if half == "forward":
            self._in_forward = frozenset(found)
        else:
            self._tell_of_missing(self._asked - self._in_forward - found.keys())
        if not found or (plan := recorded.compiled.plan) is None:
            return run
        sites = {(s.tensor, s.kind): s for s in plan.sites}
        of = {tensor: sites.get((tensor.name, tensor.kind)) for tensor in found}
        watched = WatchedHalf(recorded.gm, found, _casts(recorded.gm.graph, of))

        def call(args: list[Any]) -> Any:
            controller = self._due(half)
            if controller is None:
                return run(args)
            values = watched.before(args)
            results = run(args)
            values |= watched.after(results)
            self._write(controller.step, half, [self._row(t, of[t], watched, values, controller) for t in found])
            return results

        return compat.boxed(call)

    def _tell_of_missing(self, missing: Set[CountedTensor]) -> None:
        if missing:
            names = [f"{t.name}:{t.kind}" for t in sorted(missing, key=lambda t: t.id)]
            detail = f"{_shown(names)}: not in the compiled step, which simplifies it away; not written"
            self.log.tell("dump_tensors", detail)

    def _row(
        self,
        tensor: CountedTensor,
        site: Site | None,
        watched: WatchedHalf,
        values: Mapping[Node, Tensor],
        controller: Controller,
    ) -> Dumped:
        node = watched.nodes[tensor]
        stored = watched.stored.get(tensor, node)
        x, kept = (_unscaled(values[n], n, controller) for n in (node, stored))
        return Dumped(self._origin(tensor, site, controller), x, kept)

    def _write(self, step: int, half: str, rows: Sequence[Dumped]) -> None:
        left_out = self.folder.write_tensors(step, half, rows, self._limit)
        if left_out and self._limit:
            over = f"beyond dump_limit ({self._limit:,} bytes), so only their statistics and hashes are written"
            detail = f"{_shown(left_out)}: {over}"
            self.log.warn_once("dump_tensors", detail, step=step)

    @cached_property
    def _limit(self) -> int:
        limit = self.settings.asked.dump_limit
        assert not isinstance(limit, str), "stored in canonical form"
        return LIMIT if limit is None else limit

    def _origin(self, tensor: CountedTensor, site: Site | None, controller: Controller) -> Origin:
        recipe, scale = self.settings.recipe, None if site is None else controller.scale_of(site.id)
        low = recipe.lo_backward if tensor.kind == "grad_output" else recipe.lo_forward
        return Origin(
            tensor=tensor.name,
            kind=tensor.kind,
            module=tensor.module,
            source=tensor.source,
            site=None if site is None else site.id,
            format=low.name if site is None else site.stored_as,
            scale_exponent=0 if scale is None else int(scale["scale_exponent"]),
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _unscaled(x: Tensor, node: Node, controller: Controller) -> Tensor:
    """Divide a gradient by the power of two that it is scaled with."""
    variable = marks(node).carried
    exponent = 0 if variable is None or controller.keeper is None else controller.keeper.exps[variable]
    return x * 2.0**-exponent if exponent else x


def _casts(graph: Graph, sites: Mapping[CountedTensor, Site | None]) -> dict[CountedTensor, Node]:
    """Return the node that is stored for each forward tensor: it may have a mean subtracted, or its signs kept."""
    stored = {cast.row: cast.x for _, cast in Quantize.among(graph.nodes)}
    found = {t: stored.get(s.id) for t, s in sites.items() if s is not None and s.direction == "forward"}
    return {t: node for t, node in found.items() if node is not None and numel_hint(node.meta["val"]) == t.elements}


class WatchedHalf:
    """The places of requested tensors and of their stored copies in a half: an input, a result, or an inner node."""

    def __init__(
        self, gm: GraphModule, nodes: Mapping[CountedTensor, Node], stored: Mapping[CountedTensor, Node]
    ) -> None:
        self.nodes, self.stored = nodes, stored
        wanted = dict.fromkeys((*nodes.values(), *stored.values()))
        inputs, results = list(gm.graph.find_nodes(op="placeholder")), results_of(gm.graph)
        self._inputs = {n: inputs.index(n) for n in wanted if n.op == "placeholder"}
        self._results = {n: results.index(n) for n in wanted if n in results and n not in self._inputs}
        self._inner = [n for n in wanted if n not in self._inputs and n not in self._results]
        self._compute = _alone(gm, self._inner) if self._inner else None

    def before(self, args: Sequence[Any]) -> dict[Node, Tensor]:
        """Return wanted inputs, and inner nodes recomputed from them. Call it before the run empties ``args``."""
        found = {n: args[i].detach().clone() for n, i in self._inputs.items()}
        if self._compute is not None:
            devices = {a.get_device() for a in args if isinstance(a, Tensor) and a.is_cuda}
            with torch.no_grad(), torch.random.fork_rng(devices):
                found |= zip(self._inner, self._compute(*args), strict=True)
        return found

    def after(self, results: Sequence[Any]) -> dict[Node, Tensor]:
        """Return the wanted tensors among the half's results."""
        return {n: results[i].detach() for n, i in self._results.items()}


def _alone(gm: GraphModule, nodes: Sequence[Node]) -> GraphModule:
    """Return a graph that computes only these nodes, and does not modify its inputs."""
    found = copied(gm)
    by_name = {n.name: n for n in found.graph.nodes}
    found.graph.output_node().args = (tuple(by_name[n.name] for n in nodes),)
    for node in [n for n in found.graph.nodes if n.target in MUTATIONS]:
        node.replace_all_uses_with(node.args[1])
        found.graph.erase_node(node)
    found.graph.eliminate_dead_code()
    found.recompile()
    return runnable(found)
