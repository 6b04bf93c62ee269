"""Check casts for bias and attention logits for growth in every n-th step (``watch_every``).

In such a step the reference lowering runs each half a second time, node by node, on the same inputs. Copies that
forward stores for backward are taken from the compiled code, so faults of a kernel show. Casts inside a half are the
reference's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from fxprec import compat
from fxprec.driver.event_log import EventLog
from fxprec.driver.interpreter import DRAWN, runnable
from fxprec.driver.record import EveryNth, RecordedHalf
from fxprec.driver.wrappers import Run
from fxprec.ir.symbolic import AS_STORED, DEQUANTIZE, CorrectScales, Quantize
from fxprec.kernels.updates import ApplyUpdate
from fxprec.numerics.bias import Bias, bias, block_bias
from fxprec.numerics.blocks import AnyFormat, BlockFormat, find
from fxprec.passes.analysis.attention import Attention, attentions
from fxprec.passes.analysis.joint import argument, has_tag, input_at, results_of
from fxprec.passes.analysis.marks import marks
from fxprec.passes.analysis.operators import module_of, source_of
from fxprec.passes.analysis.ops import MUTATIONS
from fxprec.plan.lines import place
from fxprec.runtime.controller import Controller, describe
from fxprec.runtime.growth import Growth


@dataclass
class NumericsWatch:
    """Watcher of one graph's halves in every n-th step."""

    every: int
    log: EventLog
    controller: Callable[[], Controller | None]
    """Returns the graph's controller, or None before the graph has a plan."""
    logits: dict[str, Growth] = field(default_factory=dict)
    """The largest logits of each attention; keys are ``module, source``."""
    _biased: set[str] = field(default_factory=set)
    _watches: bool = False

    def __post_init__(self) -> None:
        self._due = EveryNth(self.every, self.controller)

    def watch(self, graph: str, half: str, recorded: RecordedHalf, run: Run) -> Run:
        """Wrap ``run``, so that casts and attention of the half are measured in every n-th step."""
        found = _Watched.of(recorded.gm)
        self._watches = bool(found.casts or found.attentions) or (half == "backward" and self._watches)
        if half == "backward" and not self._watches:
            self.log.tell("watch_every", "nothing in the step is rounded by a cast, and there is no attention")
        if not found.casts and not found.attentions:
            return run
        look = found.after if half == "forward" else found.before

        def call(args: list[Any]) -> Any:
            controller = self._due(half)
            if controller is None:
                return run(args)
            step = controller.step
            results, seen = look(run, args, controller)
            self._note(step, seen, controller)
            return results

        return compat.boxed(call)

    def _note(self, step: int, seen: _Seen, controller: Controller) -> None:
        for node, found in seen.biases.items():
            self._note_bias(step, _site_of(node, controller), found)
        for attention, largest in seen.logits:
            growth = self.logits.setdefault(attention.name, Growth())
            detail = growth.note(step, float(largest))
            if detail is not None:
                self._tell("logit-growth", attention.name, detail, step)

    def _note_bias(self, step: int, site: str, found: Bias) -> None:
        """Warn of a biased cast once, and again only if it was unbiased in between."""
        if found.is_biased and site not in self._biased:
            self._tell("biased", site, f"it is rounded {found}", step)
        (self._biased.add if found.is_biased else self._biased.discard)(site)

    def _tell(self, kind: str, site: str, detail: str, step: int) -> None:
        self.log.note(kind, site, detail, step=step)
        self.log.warn(f"{site}: {detail}")


def _site_of(cast: Node, controller: Controller) -> str:
    """Return the name of the tensor that a cast rounds: the plan's site, or the operand of a GEMM."""
    call = Quantize.match(cast)
    assert call is not None
    of = marks(cast).operand_of
    if of is None:
        return describe(controller.site_of(call.row))
    gemm = controller.plan.gemms[of[0]]
    return f"operand {call.x.name} of {place(gemm.node, gemm.module)} ({_place(cast)})"


def _place(node: Node) -> str:
    return place(module_of(node), source_of(node)) or node.name


@dataclass
class _Seen:
    """The measurements of one run of a half."""

    biases: dict[Node, Bias] = field(default_factory=dict)
    """Bias by cast node."""
    logits: list[tuple[Attention, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _Watched:
    """A half with symbolic casts, and the nodes in it that are measured."""

    gm: GraphModule
    casts: Mapping[Node, Node]
    """Cast by the node whose result is stored: for MS-EDEN that is the node that corrects the cast's scales."""
    attentions: Mapping[Node, Attention]
    written: tuple[int, ...]
    """Positions of the inputs that the half writes to."""
    random: Set[Node]
    """Nodes that depend on random numbers: for one seed Inductor draws other numbers than the reference."""

    @classmethod
    def of(cls, gm: GraphModule) -> _Watched:
        graph = runnable(gm).graph
        inputs = list(graph.find_nodes(op="placeholder"))
        written = {argument(n, 0) for n in graph.nodes if n.target in MUTATIONS}
        return cls(
            gm,
            {_stored(q): q for q in Quantize.nodes(graph)},
            {found.node: found for found in attentions(iter(graph.nodes))},
            tuple(i for i, n in enumerate(inputs) if n in written),
            _made_of_random_numbers(graph),
        )

    def after(self, run: Run, args: list[Any], controller: Controller) -> tuple[Any, _Seen]:
        """Run the half, then measure it with the copies that it stored."""
        mine = [a.detach().clone() if i in self.written else a for i, a in enumerate(args)]
        state = _random_state(args)
        results = run(args)
        nodes = results_of(self.gm.graph)
        own = {
            n: r
            for n, r in zip(nodes, results, strict=True)
            if isinstance(n, Node) and n in self.casts and n not in self.random
        }
        return results, self._look(mine, own, state, controller)

    def before(self, run: Run, args: list[Any], controller: Controller) -> tuple[Any, _Seen]:
        """Measure the half, then run it: the run may overwrite its inputs."""
        seen = self._look(list(args), {}, _random_state(args), controller)
        return run(args), seen

    def _look(
        self, args: Sequence[Any], own: Mapping[Node, Tensor], state: _RandomState, controller: Controller
    ) -> _Seen:
        seen = _Seen()
        devices = {a.get_device() for a in args if isinstance(a, Tensor) and a.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices):
            _restore(state)
            _Walk(self, own, seen, controller).run(*args)
        return seen


def _made_of_random_numbers(graph: Graph) -> Set[Node]:
    """Return nodes that depend on drawn numbers. A cast's seed does not count: it determines the cast's random bits."""
    found = set[Node]()
    for node in graph.nodes:
        is_drawn = node.target in DRAWN or has_tag(node, torch.Tag.nondeterministic_seeded)
        call = Quantize.match(node)
        operands = node.all_input_nodes if call is None else [call.x]
        if node.op == "call_function" and (is_drawn or not found.isdisjoint(operands)):
            found.add(node)
    return found


_RandomState = tuple[Tensor, Mapping[int, Tensor]]


def _random_state(args: Sequence[Any]) -> _RandomState:
    devices = {a.get_device() for a in args if isinstance(a, Tensor) and a.is_cuda}
    return torch.get_rng_state(), {device: torch.cuda.get_rng_state(device) for device in devices}


def _restore(state: _RandomState) -> None:
    torch.set_rng_state(state[0])
    for device, of_device in state[1].items():
        torch.cuda.set_rng_state(of_device, device)


def _stored(cast: Node) -> Node:
    return next((user for user in cast.users if user.target is CorrectScales.target), cast)


class _Walk(Interpreter):
    """An interpreter that runs a half by the reference, and measures its casts and attentions."""

    def __init__(self, watched: _Watched, own: Mapping[Node, Tensor], seen: _Seen, controller: Controller) -> None:
        super().__init__(watched.gm)
        self.watched, self.own, self.seen, self.controller = watched, own, seen, controller
        self._inputs = dict[Node, tuple[Any, ...]]()

    def run_node(self, n: Node) -> Any:
        if n.target in MUTATIONS and input_at(n, 0).op == "placeholder":
            return self.fetch_args_kwargs_from_env(n)[0][1]  # without writing to the model's tensor
        if n.target is ApplyUpdate.target:
            return self.fetch_args_kwargs_from_env(n)[0][1].new_empty(0)  # the compiled half steps the parameter
        if n.target is Quantize.target:
            self._inputs[n] = self.fetch_args_kwargs_from_env(n)[0]
        attention = self.watched.attentions.get(n)
        given = self.fetch_args_kwargs_from_env(n) if attention is not None else ((), {})
        result = super().run_node(n)
        if attention is not None:
            self.seen.logits.append((attention, attention.largest(*given, result)))
        if n in self.watched.casts:
            self._measure(self.watched.casts[n], self.own.get(n, result))
        return result

    def _measure(self, cast: Node, stored: Tensor) -> None:
        call = Quantize.match(cast)
        assert call is not None
        x, table, *_ = given = self._inputs.pop(cast)
        whole = given[6] if len(given) > 6 else None
        fmt = find(self.controller.site_of(call.row).format if call.is_simulated and call.row >= 0 else call.format)
        self.seen.biases[cast] = cast_bias(x, stored, call, fmt, table, whole)


def cast_bias(
    x: Tensor, stored: Tensor, call: Quantize, fmt: AnyFormat, table: Tensor, whole: Tensor | None = None
) -> Bias:
    """Return the bias of a cast of ``x`` to ``fmt``. ``stored``: codes, a carrier of them, or `block_codec.records`.

    ``table`` has the scale of the cast's row; ``whole`` is the tensor scale of a block format. ``stored`` has the
    shape of ``x``, or of the records.
    """
    if isinstance(fmt, BlockFormat):
        return block_bias(x, stored, fmt, whole)
    read = (
        stored if call.is_simulated else DEQUANTIZE(stored, table, AS_STORED, call.format, call.storage, torch.float32)
    )
    return bias(x.double() * 2.0 ** int(table[call.row, 0]), read, fmt)
