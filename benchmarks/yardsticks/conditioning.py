"""How far rounded copies of what an ATen operator's backward reads put the gradient off that it hands on.

Each operator of op_db is traced as fxprec traces it, forward and backward in one graph of ATen operators. Of each ATen
operator in it, what its backward reads of its own operands, or of its own result, is replaced by a rounded copy, and its
backward alone is run again. The error is that of the gradients it hands on, in the Euclidean norm, over ``DRAWS`` random
incoming gradients and all samples of one operator of op_db together, so that sums which happen to cancel, and samples
whose gradient is next to nothing, do not count for more. The largest over op_db is the operator's. A function of one
number is also measured over its whole domain, close to the borders, where op_db's random numbers do not come.

What no pass would round is left out: divisors, masks, statistics, what is compared or exponentiated
(``passes/analysis/values.py``, ``sensitive.py``).
"""

from __future__ import annotations

import functools
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import fxprec.ir.operators
from benchmarks.yardsticks import exercise
from fxprec.ir.operators import HighReason, models
from fxprec.passes.analysis import sensitive
from fxprec.passes.analysis.groups import group_tensors
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.passes.analysis.joint import JointGraph
from fxprec.passes.analysis.operators import Operator, Operators, recover_operators
from fxprec.passes.analysis.values import is_plain_float, mark_values

TABLE = Path(fxprec.ir.operators.__file__).parent / "measured.json"
FORMATS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}
SAMPLES, DRAWS = 6, 4
OVER_ITS_DOMAIN = " over its domain"
NOISE, UNDETERMINED = (
    2.0**-22,
    0.01,
)  # where a copy that is off by float32's own rounding does that much, nothing is measured
BY_HAND = {kept.why for one in models.BY_HAND for kept in (one.spec.result, one.spec.operands) if kept is not None}
KEPT_ANYWAY = (sensitive.COMPARED, sensitive.STATISTIC, sensitive.EXPONENTIATED)
LARGEST = 1e18  # of squares; stands for inf and NaN too
Errors = dict[str, float]
"""By format."""


@dataclass
class Pool:
    """Squares of what was off and of what is right, by format, over the samples of one operator of op_db."""

    off: Errors = field(default_factory=lambda: dict.fromkeys(FORMATS, 0.0))
    exact: float = 0.0

    def add(self, off: Errors, exact: float) -> None:
        self.exact += exact
        for fmt, square in off.items():
            self.off[fmt] += square

    def errors(self) -> Errors:
        return {fmt: (square / self.exact) ** 0.5 for fmt, square in self.off.items()}


@dataclass
class Measured:
    """Pools by ATen operator, by what its backward reads, and by the operator of op_db that exercised it."""

    pools: dict[tuple[str, str, str], Pool] = field(default_factory=lambda: defaultdict(Pool))
    seen: set[str] = field(default_factory=set)
    covered: set[str] = field(default_factory=set)
    """Operators exercised over their whole domain; those that are undetermined anywhere are not."""
    undetermined: set[tuple[str, str]] = field(default_factory=set)
    """What is read where float32 itself does not determine the gradient."""

    def table(self) -> dict[str, Any]:
        """Return plain data: of each operator and role the largest error, two digits, and who exercised it."""
        measured = {(name, role) for name, role, _ in self.pools}
        unknown = {name for name, role in self.undetermined - measured}
        covered = self.covered - {name for name, _ in self.undetermined}
        rows: dict[str, Any] = {name: {"covered": name in covered} for name in sorted(self.seen - unknown)}
        for (name, role, by), pool in sorted(self.pools.items()):
            if name in unknown:
                continue
            errors = pool.errors()
            if role not in rows[name] or errors["e4m3fn"] > rows[name][role]["e4m3fn"]:
                rows[name][role] = {**{fmt: float(f"{error:.2g}") for fmt, error in errors.items()}, "by": by}
        return rows


class _Enough(Exception):
    """Ends a compilation."""


def traced(model: exercise.Exercised, operands: list[Tensor]) -> Iterator[tuple[GraphModule, tuple[Any, ...]]]:
    """Yield the first joint graph of the operator on these operands, with its forward inputs."""
    from functorch.compile import default_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    found: list[GraphModule] = []
    given: list[tuple[Any, ...]] = []

    def partition(joint: GraphModule, *args: Any, **options: Any) -> Any:
        found.append(GraphModule(joint, joint.graph))
        return default_partition(joint, *args, **options)

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        aot = aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=partition, decompositions=select_decomp_table())
        aot(gm, examples)

        def run(*args: Any) -> Any:
            given.append(args)
            raise _Enough

        return run

    torch._dynamo.reset()
    try:
        torch.compile(model.applied, backend=backend, dynamic=False)(*operands)
    except Exception as error:
        if not isinstance(getattr(error, "inner_exception", error), _Enough):
            raise
    if len(found) == len(given) == 1 and not any(isinstance(t, torch.SymInt) for t in given[0]):
        yield found[0], given[0]


def measure_sample(gm: GraphModule, given: tuple[Any, ...], by: str, into: Measured) -> None:
    """Measure each operator of a joint graph."""
    inputs = [GraphInput(f"input{i}", "input", "") for i in range(len(given))]
    joint = JointGraph(gm.graph, inputs)
    mark_values(gm.graph)
    operators = recover_operators(joint)
    grouped = group_tensors(operators)
    reasons = sensitive.reasons_high(grouped)
    counted = {n: reasons.get(tensor.id) for n, tensor in grouped.values.items() if is_plain_float(n)}
    environments = [_environment(gm, joint, given, seed) for seed in range(DRAWS)]
    is_alone = sum(not op.is_view for op in operators.all) == 1
    for op in operators.all:
        if op.is_view or op.is_gemm or not op.backward or not op.aten.startswith("aten."):
            continue
        into.seen.add(op.aten)
        bases = {"operands": {operators.base(n) for n in op.inputs}, "result": set(op.outputs)}
        for role, values in bases.items():
            meant = {n for n in values if n in counted and not _is_kept_anyway(counted[n], op)}
            copies = _copies(op, operators, meant, environments[0])
            if copies and (found := _errors(op, copies, environments)):
                into.pools[op.aten, role, by].add(*found)
                if is_alone and by.endswith(OVER_ITS_DOMAIN):
                    into.covered.add(op.aten)
            elif copies:
                into.undetermined.add((op.aten, role))


def _is_kept_anyway(reason: HighReason | None, op: Operator) -> bool:
    """Return whether a value stays above 8 bits for another reason than how ``op``'s backward bears them."""
    if reason is None or reason.unknown:
        return False
    why, _, name = reason.why.rpartition(" (")
    return reason in KEPT_ANYWAY or (why in BY_HAND and name != f"{op.aten})")


def _environment(gm: GraphModule, joint: JointGraph, given: tuple[Any, ...], seed: int) -> dict[Node, Any]:
    """Run the joint graph with random gradients of its outputs; return the value of each node."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(exercise.SEED)
    values, env = iter(given), {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and joint.is_tangent(node):
            val = node.meta["val"]
            env[node] = torch.randn(val.shape, generator=generator, dtype=torch.float32).to(val.dtype)
        elif node.op == "placeholder" and joint.describe(node).kind == "other":
            env[node] = torch.tensor([])  # a token, which orders a check of linalg's results
        elif node.op == "placeholder":
            value = next(values)
            env[node] = value.detach() if isinstance(value, Tensor) else value
        elif node.op == "get_attr":
            env[node] = getattr(gm, node.target)
        elif node.op == "call_function":
            env[node] = _call(node, env.__getitem__)
    return env


def _call(node: Node, value: Callable[[Node], Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), value)
    return node.target(*args, **kwargs)


def _copies(op: Operator, operators: Operators, values: set[Node], env: dict[Node, Any]) -> set[Node]:
    """Return what ``op``'s backward reads of ``values``."""
    read = {n for node in op.backward for n in node.all_input_nodes if n not in op.backward}
    return {n for n in read if operators.base(n) in values and _is_float(env[n])}


def _errors(op: Operator, copies: set[Node], environments: list[dict[Node, Any]]) -> tuple[Errors, float] | None:
    """Return the squares of what rounded ``copies`` put the gradients off, and of the gradients.

    None where ``op``'s backward hands on nothing that float32 determines.
    """
    inside, first = set(op.backward), environments[0]
    leaving = [node for node in op.backward if not inside.issuperset(node.users) and _is_float(first[node])]
    replayed = functools.partial(_replayed, op, environments, copies)
    noise = replayed(_noisy, leaving)
    leaving = [
        n
        for n, (off, exact) in zip(leaving, noise, strict=True)
        if 0 < exact < LARGEST and off < UNDETERMINED**2 * exact
    ]
    if not leaving:
        return None
    found = {fmt: replayed(functools.partial(exercise.rounded, dtype=dtype), leaving) for fmt, dtype in FORMATS.items()}
    squares = {fmt: sum(min(off, LARGEST * exact) for off, exact in pairs) for fmt, pairs in found.items()}
    return squares, sum(exact for _, exact in found["bf16"])


def _replayed(
    op: Operator,
    environments: list[dict[Node, Any]],
    copies: set[Node],
    change: Callable[[Tensor], Tensor],
    leaving: list[Node],
) -> list[tuple[float, float]]:
    """Return for each gradient that ``op`` hands on the squares of what changed copies put it off, and of itself."""
    replays = [_replay(op, env, {n: change(env[n]) for n in copies}) for env in environments]
    found = []
    for node in leaving:
        exact, got = (torch.stack([values[node].double() for values in of]) for of in (environments, replays))
        off = float((got - exact).square().sum())
        found.append((off if off == off else float("inf"), float(exact.square().sum())))
    return found


def _noisy(t: Tensor) -> Tensor:
    sign = torch.randint(2, t.shape, generator=torch.Generator().manual_seed(exercise.SEED)) * 2 - 1
    return t * (1 + NOISE * sign)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.layout is torch.strided


def _replay(op: Operator, env: dict[Node, Any], copies: dict[Node, Tensor]) -> dict[Node, Any]:
    """Run ``op``'s backward alone, on what ``env`` holds, with ``copies`` in the place of what it reads."""
    known = {**env, **copies}
    torch.manual_seed(exercise.SEED)
    for node in op.backward:
        known[node] = _call(node, known.__getitem__)
    return known


def measure(op: Any, into: Measured) -> None:
    """Measure the ATen operators that one operator of op_db is made of."""
    everything = list(exercise.samples_of(op))
    name = exercise.name_of(op)
    for model in everything[:: max(1, -(-len(everything) // SAMPLES))]:
        _measure_model(model, [model.flat[place] for place in model.places], name, into)
    unary = [model for model in everything if len(model.places) == 1]
    if hasattr(op, "domain") and hasattr(op, "ref") and unary and not hasattr(op, "lhs_make_tensor_kwargs"):
        _measure_model(unary[0], [domain_of(op)], f"{name}{OVER_ITS_DOMAIN}", into)


def _measure_model(model: exercise.Exercised, operands: list[Tensor], by: str, into: Measured) -> None:
    torch.manual_seed(exercise.SEED)
    for gm, given in traced(model, [t.clone().requires_grad_() for t in operands]):
        measure_sample(gm, given, by, into)


def domain_of(op: Any) -> Tensor:
    """Return numbers all over the domain of an operator of one operand: small, large, and close to its borders."""
    lowest, highest = op.domain
    powers = 2.0 ** torch.arange(
        -12, 6.25, 0.25
    )  # four to each factor of 2: that one rounds to next to nothing is chance
    parts = [torch.linspace(-8, 8, 129), powers, -powers, *(n + powers[:24] for n in (-3, -2, -1, 1))]
    parts += [lowest + powers] if lowest is not None else []
    parts += [highest - powers] if highest is not None else []
    numbers = torch.cat(parts)
    inside = (numbers > (-torch.inf if lowest is None else lowest)) & (
        numbers < (torch.inf if highest is None else highest)
    )
    return numbers[inside]


def measured(operators: list[Any], seconds: int, tell: Callable[[str, str], None]) -> Measured:
    """Measure operators of op_db, each within ``seconds``; ``tell`` is told the name and what failed, if anything."""
    into = Measured()
    for op in operators:
        said = ""
        try:
            with warnings.catch_warnings(), exercise.within(seconds):
                warnings.simplefilter("ignore")
                measure(op, into)
        except (Exception, exercise.LateError) as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        tell(exercise.name_of(op), said)
    return into


def write(found: Measured, path: Path = TABLE) -> Path:
    """Write the table that ``fxprec.ir.operators`` reads."""
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found.table().items()]
    head = f'{{"torch": {json.dumps(metadata.version("torch"))}, "operators": {{\n'
    path.write_text(head + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    return path
