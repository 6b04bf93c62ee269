"""Runs a recorded step again with each stored copy replaced as an experiment requires.

A half is interpreted without its casts: ``quantize`` returns what the function given to `Lab.run` returns, and
``dequantize`` passes it on. So the same two halves give the exact gradients, and the gradients with one group low. If
the copies require a gradient, they also give how much each element of a copy matters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxprec.compat import tree_map_only
from fxprec.diagnosis.subject import same_random_numbers
from fxprec.diagnosis.substitutes import SUBSTITUTES
from fxprec.driver.interpreter import runnable
from fxprec.driver.record import RecordedHalf
from fxprec.ir.symbolic import (
    CorrectScales,
    Dequantize,
    KeepNonfinite,
    Quantize,
    Rescale,
    TensorScale,
    is_in_blocks,
)
from fxprec.passes.analysis.joint import argument, input_at, results_of
from fxprec.passes.analysis.marks import marks
from fxprec.passes.analysis.ops import MUTATIONS
from fxprec.runtime.reference_ops import keep_nonfinite

aten = torch.ops.aten


@dataclass(frozen=True)
class Cast:
    """One place where a tensor is stored. A site has one cast; in ``simulate`` it has one for each consumer."""

    name: str
    """Name of the ``quantize`` node."""
    in_backward: bool
    call: Quantize
    reads: tuple[Dequantize, ...]
    """The dequantizes that read the stored copy."""
    keeps_above: bool = False
    """Whether values above 0 are stored as at least the format's smallest number (pass keep-signs)."""
    keeps_below: bool = False
    operand_of: tuple[int, int] | None = None
    """For a GEMM's operand in blocks, the GEMM's id and its weight's elements. Such a cast has no site."""


Read = Callable[[Cast, Tensor], Tensor]
"""Maps a cast and the exact value to what the readers of the stored copy get."""


def exact(cast: Cast, x: Tensor) -> Tensor:
    """Return the value itself: storage loses nothing."""
    return x


@dataclass
class Lab:
    """The recorded forward and backward half of one graph."""

    forward: RecordedHalf
    backward: RecordedHalf
    undifferentiable: set[str] = field(default_factory=set)
    """Names of operators that were met and have no derivative."""

    def __post_init__(self) -> None:
        self._halves = [runnable(half.gm) for half in (self.forward, self.backward)]
        self._saved = [n.name for n in self.backward.gm.graph.find_nodes(op="placeholder")]
        self.casts = tuple(_casts(*self._halves))
        self._by_name = {cast.name: cast for cast in self.casts}
        self._is_fixed = not Dequantize.nodes(self.forward.gm.graph) and self._stores_only_copies()
        self._kept: dict[str, Any] | None = None

    def _stores_only_copies(self) -> bool:
        """Return whether forward saves the very results of its casts, so that only backward has to be run again."""
        results = set(results_of(self.forward.gm.graph))
        casts = Quantize.nodes(self.forward.gm.graph)
        return all(q in results and all(u.op == "output" for u in q.users) for q in casts)

    @property
    def table(self) -> Tensor:
        """The scale table of the step, (rows, columns) int32."""
        for half in (self.forward, self.backward):
            names = [n.name for n in half.gm.graph.find_nodes(op="placeholder")]
            for _, call in Quantize.among(Quantize.nodes(half.gm.graph)):
                result: Tensor = self._args(half)[names.index(call.table.name)]
                return result
        return torch.zeros(0, 0, dtype=torch.int32, device="cpu")  # no cast reads the table

    def run(self, read: Read = exact, *, differentiate: bool = False) -> list[Any]:
        """Return backward's results: gradients in the order of forward's inputs, None for an input without one."""
        with same_random_numbers(self._args(self.forward)):
            saved = self._run_forward(read, differentiate)
            args = self._args(self.backward)
            for i, name in enumerate(self._saved):
                args[i] = saved.get(name, args[i])
            walk = _Walk(self, self._halves[1], read, differentiate)
            return list(walk.run(*args))

    def values(self, names: Container[str]) -> dict[str, Tensor]:
        """Return the exact value of each cast of these names."""
        found: dict[str, Tensor] = {}

        def note(cast: Cast, x: Tensor) -> Tensor:
            if cast.name in names:
                found[cast.name] = x
            return x

        self.run(note)
        return found

    def _run_forward(self, read: Read, differentiate: bool) -> dict[str, Any]:
        if not self._is_fixed:
            return self._forward_results(read, differentiate)
        if self._kept is None:
            self._kept = self._forward_results(exact, False)
        return {n: read(self._by_name[n], v) if n in self._by_name else v for n, v in self._kept.items()}

    def _forward_results(self, read: Read, differentiate: bool) -> dict[str, Any]:
        walk = _Walk(self, self._halves[0], read, differentiate)
        results = walk.run(*self._args(self.forward))
        nodes = results_of(self.forward.gm.graph)
        wanted = set(self._saved)
        pairs = zip(nodes, results, strict=True)
        return {
            n.name: value for n, value in pairs if isinstance(n, Node) and n.name in wanted and n.op != "placeholder"
        }

    @staticmethod
    def _args(half: RecordedHalf) -> list[Any]:
        assert half.args is not None, "the half has run"
        return [a.detach() if isinstance(a, Tensor) else a for a in half.args]


class _Walk(Interpreter):
    """Runs a half without its casts."""

    def __init__(self, lab: Lab, gm: GraphModule, read: Read, differentiate: bool) -> None:
        super().__init__(gm)
        self.lab, self.read, self.differentiate = lab, read, differentiate

    def run(self, *args: object) -> Sequence[Any]:  # type: ignore[override]
        with torch.set_grad_enabled(self.differentiate):
            result: Sequence[Any] = super().run(*args)
            return result

    def run_node(self, n: Node) -> object:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is Quantize.target:
            return self.read(self.lab._by_name[n.name], args[0])
        if n.target is Dequantize.target:
            return (args[0].reshape(-1) if is_in_blocks(n) else args[0]).to(args[5])
        if n.target is TensorScale.target:
            return args[0].new_zeros(1, dtype=torch.float32)  # no dequantize uses it
        if n.target in (Rescale.target, CorrectScales.target):
            return args[0]  # for blocks these are numbers, rounded to nearest
        if n.target is aten.view.default:
            return args[0].reshape(args[1])  # a value that replaces a copy may have other strides
        if n.target is KeepNonfinite.target:
            return keep_nonfinite(*args)
        if n.target in MUTATIONS and n.all_input_nodes[0].op == "placeholder":
            return args[1]  # a step that is run again must not change the model
        if not self.differentiate:
            return super().run_node(n)
        return self._differentiably(n, args, kwargs)

    def _differentiably(self, n: Node, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        run = SUBSTITUTES.get(n.target, n.target)
        try:
            result = run(*args, **kwargs)  # type: ignore[operator]
        except (NotImplementedError, RuntimeError):  # an operator without autograd, such as those of prims
            with torch.no_grad():
                result = super().run_node(n)
            self.lab.undifferentiable.add(str(n.target))
            return result
        if any(_is_dead_end(leaf) for leaf in (result if isinstance(result, list | tuple) else [result])):
            self.lab.undifferentiable.add(str(n.target))
            return tree_map_only(Tensor, Tensor.detach, result)
        return result


def _is_dead_end(value: object) -> bool:
    """Return whether autograd has no derivative of the operator that made a tensor."""
    return isinstance(value, Tensor) and type(value.grad_fn).__name__ in ("NotImplemented", "Error")


def _casts(*halves: GraphModule) -> list[Cast]:
    """Return the casts of both halves in execution order, each with the dequantizes that read it."""
    found = []
    for i, gm in enumerate(halves):
        for q, call in Quantize.among(Quantize.nodes(gm.graph)):
            reads = [d for half in halves[i:] for d in _reads(half, q.name)]
            of = marks(q).operand_of
            found.append(Cast(q.name, bool(i), call, tuple(reads), *_keeps_signs(call.x), of))
    return found


def _keeps_signs(x: Node) -> tuple[bool, bool]:
    """Return whether the pass keep-signs moved values above 0, and values below 0, away from it."""
    compared = set()
    while x.target is aten.where.self and all(isinstance(arg, Node) for arg in x.args):
        condition, _, x = (input_at(x, i) for i in range(3))
        if argument(condition, 1) == 0:
            compared.add(condition.target)
    return aten.gt.Scalar in compared, aten.lt.Scalar in compared


def _reads(gm: GraphModule, name: str) -> list[Dequantize]:
    start = next((n for n in gm.graph.nodes if n.name == name), None)
    if start is None:
        return []
    found, waiting = list[Dequantize](), [start]
    while waiting:
        for user in waiting.pop().users:
            if (call := Dequantize.match(user)) is not None:
                found.append(call)
            elif user.op == "call_function":
                waiting.append(user)
    return found
