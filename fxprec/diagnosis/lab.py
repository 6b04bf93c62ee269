"""A recorded step run again, each stored copy replaced by whatever one wants to try.

A half is interpreted with its casts taken out: ``quantize`` hands on what `Lab.run` is told that readers get, and
``dequantize`` passes it through. So the same two halves give the exact gradients, those with one group low, and, where
the copies carry a gradient themselves, how much each of their elements matters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxprec.compat import tree_map_only
from fxprec.diagnosis.subject import same_random_numbers
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
from fxprec.passes.analysis.ops import MUTATIONS
from fxprec.passes.casts.operands import OPERAND_META
from fxprec.runtime.reference_ops import keep_nonfinite

aten = torch.ops.aten
Run = Callable[..., Any]


@dataclass(frozen=True)
class Cast:
    """A place where a tensor is stored. A site has one, or in ``simulate`` one for each consumer."""

    name: str
    """Name of the ``quantize`` node."""
    row: int
    in_backward: bool
    call: Quantize
    reads: tuple[Dequantize, ...]
    """How what is stored is read back."""
    keeps_above: bool = False
    """Whether what is above 0 is stored as no less than the format's smallest number (pass keep-signs)."""
    keeps_below: bool = False
    operand_of: tuple[int, int] | None = None
    """For a GEMM's operand in blocks: id of the GEMM, elements of its weight. Such a cast has no site."""


Read = Callable[[Cast, Tensor], Tensor]
"""What readers of a stored tensor get, of the exact value."""


def exact(cast: Cast, x: Tensor) -> Tensor:
    """Return the value itself: nothing is lost in storage."""
    return x


@dataclass
class Lab:
    """The two halves of one graph."""

    forward: RecordedHalf
    backward: RecordedHalf
    substitutes: Mapping[object, Run] = field(default_factory=dict)
    """What runs in place of an operator while gradients are recorded."""
    undifferentiable: set[str] = field(default_factory=set)
    """Operators met that no gradient goes through."""

    def __post_init__(self) -> None:
        self._halves = [runnable(half.gm) for half in (self.forward, self.backward)]
        self._saved = [n.name for n in self.backward.gm.graph.find_nodes(op="placeholder")]
        self.casts = tuple(_casts(*self._halves))
        self._by_name = {cast.name: cast for cast in self.casts}
        self._is_fixed = not Dequantize.nodes(self.forward.gm.graph) and self._stores_only_copies()
        self._kept: dict[str, Any] | None = None

    def _stores_only_copies(self) -> bool:
        """Say whether what forward saves of its casts are their very results, so that backward alone can run again."""
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
        return torch.zeros(0, 0, dtype=torch.int32, device="cpu")  # no cast reads it

    def run(self, read: Read = exact, *, differentiate: bool = False) -> list[Any]:
        """Return what backward returns: gradients in the order of forward's inputs, None where there is none."""
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

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is Quantize.target:
            return self.read(self.lab._by_name[n.name], args[0])
        if n.target is Dequantize.target:
            return (args[0].reshape(-1) if is_in_blocks(n) else args[0]).to(args[5])
        if n.target is TensorScale.target:
            return args[0].new_zeros(1, dtype=torch.float32)  # nobody decodes with it
        if n.target in (Rescale.target, CorrectScales.target):
            return args[0]  # of blocks these are numbers, rounded to nearest
        if n.target is aten.view.default:
            return args[0].reshape(args[1])  # what is read instead of a copy may lie otherwise in memory
        if n.target is KeepNonfinite.target:
            return keep_nonfinite(*args)
        if n.target in MUTATIONS and n.all_input_nodes[0].op == "placeholder":
            return args[1]  # a step that is run again leaves the model as it was
        if not self.differentiate:
            return super().run_node(n)
        return self._differentiably(n, args, kwargs)

    def _differentiably(self, n: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.lab.substitutes.get(n.target, n.target)
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
    """Say whether autograd knows no derivative of what made a tensor."""
    return isinstance(value, Tensor) and type(value.grad_fn).__name__ in ("NotImplemented", "Error")


def _casts(*halves: GraphModule) -> list[Cast]:
    """Return the casts of both halves in execution order, each with the places that read it."""
    found = []
    for i, gm in enumerate(halves):
        for q, call in Quantize.among(Quantize.nodes(gm.graph)):
            reads = [d for half in halves[i:] for d in _reads(half, q.name)]
            of = q.meta.get(OPERAND_META)
            found.append(Cast(q.name, call.row, bool(i), call, tuple(reads), *_keeps_signs(call.x), of))
    return found


def _keeps_signs(x: Node) -> tuple[bool, bool]:
    """Say whether the pass keep-signs moved what is above 0, and what is below, away from it."""
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
