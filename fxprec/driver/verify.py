"""The first run of a lowered graph beside the reference (``verify=True``): each kernel's first output is compared.

The lowered graph is run node by node. A kernel gets the values the reference computed, and the nodes behind it get
the reference's result, so one wrong kernel is one fault, and what is returned is right in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from fxprec import compat
from fxprec.driver.seeded import draw_from_seeds
from fxprec.ir import symbolic, symbolic_cpu
from fxprec.numerics.stats import WIDTH, finish
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.stats import watch
from fxprec.passes.lowering.triton.kernel import Kernel

MAX_DIFFERING = 0.02
"""Share of a tensor's codes that may be a neighbour of the reference's, where a kernel sums rows or takes exp."""
TOLERANCE = 2e-5
"""Relative to the tensor's largest magnitude: float32 sums of 8192 numbers in another order."""


@dataclass(frozen=True)
class Fault:
    """A kernel whose first output is not the reference's."""

    kernel: str
    reason: str


def checked_run(
    lowered_gm: GraphModule, plain: GraphModule, lowered: Lowered, args: Sequence[Any]
) -> tuple[list[Any], list[Fault]]:
    """Run generated kernels beside ``plain``, the graph before lowering; return the right results, and faults.

    ``args`` are written where the graph writes to its inputs, as in any run.
    """
    num_outputs = len(results_of(plain.graph))
    with torch.no_grad(), np.errstate(all="ignore"):
        wanted = _Reference(draw_from_seeds(plain), lowered)
        wanted.run(*map(_copied, args))
        checker = _GeneratedChecker(draw_from_seeds(lowered_gm), lowered.generated.kernels, wanted)
        results = list(checker.run(*args))
    statistics = wanted.statistics
    if statistics is not None:
        checker.compare_statistics(statistics, results[num_outputs], lowered)
        results[num_outputs] = torch.cat([statistics, results[num_outputs][statistics.numel() :]])
    return results, checker.faults


def checked_cpu_run(lowered_gm: GraphModule, args: Sequence[Any]) -> tuple[list[Any], list[Fault]]:
    """The same for the kernels of the CPU lowering, each beside the symbolic op it stands for."""
    with torch.no_grad():
        checker = _CpuChecker(draw_from_seeds(lowered_gm))
        return list(checker.run(*args)), checker.faults


def is_compared(lowered_gm: GraphModule) -> bool:
    """Say whether a graph of the CPU lowering calls a kernel of ours; casts inside Inductor's loops are none."""
    return any(node.target in _CPU_REFERENCES for node in lowered_gm.graph.nodes)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class _Reference(Interpreter):
    """Runs the symbolic graph; keeps what kernels write, and the statistics of the rows they count."""

    def __init__(self, plain: GraphModule, lowered: Lowered) -> None:
        rows, nodes = watch(plain, lowered.generated.watched)
        super().__init__(plain)
        self.kept = {argument.origin for kernel in lowered.generated.kernels for argument in kernel.outputs}
        self.values: dict[str, torch.Tensor] = {}
        self.row_of = dict(zip(nodes, rows, strict=True))
        self.by_row: dict[int, torch.Tensor] = {}
        self.order = lowered.generated.watched

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.name in self.kept:
            self.values[n.name] = result
        if n in self.row_of:
            self.by_row[self.row_of[n]] = result
        return result

    @property
    def statistics(self) -> torch.Tensor | None:
        """Rows of counts, flat, in the order of the kernels' own, None where they count nothing."""
        return torch.cat([self.by_row[row] for row in self.order]) if self.order else None


class _GeneratedChecker(Interpreter):
    """Runs the lowered graph; each kernel's results become the reference's once they are compared."""

    def __init__(self, gm: GraphModule, kernels: Sequence[Kernel], wanted: _Reference) -> None:
        super().__init__(gm)
        self.calls = iter(kernels)
        self.wanted, self.faults = wanted, list[Fault]()

    def run_node(self, n: Node) -> Any:
        if n.target is not compat.TritonCalls.target or "in0" not in n.kwargs["kwargs"]:  # type: ignore[operator]
            return super().run_node(n)
        kernel = next(self.calls)
        expected = {a.name: self.wanted.values[a.origin].view(a.dtype) for a in kernel.outputs}
        try:
            found = super().run_node(n)
        except Exception as error:  # whatever the compiler or the interpreter says of the source
            self.faults.append(Fault(kernel.name, f"it does not run: {_line(error)}"))
            counters = self.fetch_args_kwargs_from_env(n)[1]["kwargs"].get("counters")
            return expected | {"counters": counters}
        for argument in kernel.outputs:
            reason = _difference(found[argument.name], expected[argument.name], argument.origin, exact=kernel.is_exact)
            if reason is not None:
                self.faults.append(Fault(kernel.name, reason))
                break
        return found | expected

    def compare_statistics(self, wanted: torch.Tensor, found: torch.Tensor, lowered: Lowered) -> None:
        """Ratios and largest magnitudes must agree to the last bit; moments are sums in another order."""
        pair = (wanted, found[: wanted.numel()])
        reference, rows = (
            torch.tensor(finish(v.cpu().view(-1, WIDTH)), dtype=torch.float64, device="cpu") for v in pair
        )
        owner = {row: kernel.name for kernel in lowered.generated.kernels for row in kernel.watched}
        for row, mine, theirs in zip(lowered.generated.watched, rows, reference, strict=True):
            same = torch.equal(mine[:3].nan_to_num(), theirs[:3].nan_to_num())
            near = torch.allclose(mine[3:], theirs[3:], rtol=1e-3, atol=1e-4, equal_nan=True)
            if not (same and near) and owner[row] not in {fault.kernel for fault in self.faults}:
                self.faults.append(Fault(owner[row], f"its statistics of row {row} are not the reference's"))


def _difference(found: torch.Tensor, wanted: torch.Tensor, name: str, *, exact: bool) -> str | None:
    """Say how two results differ beyond what is allowed, or None."""
    if exact:
        same = (_bits(found) == _bits(wanted)) | (_is_nan(found) & _is_nan(wanted))
        count = int((~same).sum())
        return f"{count} of {found.numel()} elements of {name} are not the reference's" if count else None
    if found.dtype == torch.float32:
        limit = TOLERANCE * float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max()) if wanted.numel() else 0.0
        close = torch.isclose(found, wanted, rtol=TOLERANCE, atol=limit, equal_nan=True)
        count = int((~close).sum())
        return f"{count} of {found.numel()} elements of {name} are off by more than {TOLERANCE:g}" if count else None
    steps = (_bits(found) - _bits(wanted)).abs()
    far, near = int((steps > 1).sum()), int((steps == 1).sum())
    if far or near > MAX_DIFFERING * found.numel() + 1:
        return f"{far + near} of {found.numel()} codes of {name} are not the reference's"
    return None


def _bits(x: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    return x.view(integer).to(torch.int64)


def _is_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.isnan(x) if x.dtype.is_floating_point else torch.zeros_like(x, dtype=torch.bool)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class _CpuChecker(Interpreter):
    """Runs a graph of CPU kernel calls; compares each with the symbolic op it stands for."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.faults: list[Fault] = []

    def run_node(self, n: Node) -> Any:
        reference = _CPU_REFERENCES.get(n.target)
        if reference is None:
            return super().run_node(n)
        args = [_copied(a) for a in self.fetch_args_kwargs_from_env(n)[0]]
        found = super().run_node(n)
        overwritten = self.fetch_args_kwargs_from_env(n)[0][0] if n.target in _IN_PLACE else None
        for name, mine, theirs in reference(found, overwritten, *args):
            reason = _difference(mine, theirs, name, exact=True)
            if reason is not None:
                self.faults.append(Fault(f"{n.name} ({n.target}, row {n.args[2]})", reason))
                mine.copy_(theirs)
        return found


_Compared = list[tuple[str, torch.Tensor, torch.Tensor]]


def _values(x: torch.Tensor, table: torch.Tensor, row: int, fmt: str, storage: str, keep: bool) -> torch.Tensor:
    q = symbolic.QUANTIZE(x, table, row, fmt, storage)
    values = symbolic.DEQUANTIZE(q, table, symbolic.AS_STORED, fmt, storage, torch.float32)
    result: torch.Tensor = symbolic.KEEP_NONFINITE(values, x) if keep else values
    return result


def _store(found: Any, x: Any, *args: Any) -> _Compared:
    source, table, row, fmt, storage = args[:5]
    compared = [("its codes", found[0], symbolic.QUANTIZE(source, table, row, fmt, storage))]
    values = x if x is not None else found[1]
    if values.numel():
        compared.append(("its values", values, _values(source, table, row, fmt, storage, args[-1])))
    return compared


def _round(found: Any, x: Any, *args: Any) -> _Compared:
    values: torch.Tensor = _values(*args)
    return [("its values", found[0] if x is None else x, values)]


def _load(found: Any, x: Any, q: torch.Tensor, table: torch.Tensor, row: int, fmt: str) -> _Compared:
    storage = "packed" if not q.dtype.is_floating_point else "native"
    return [("its values", found, symbolic.DEQUANTIZE(q, table, row, fmt, storage, torch.float32))]


_IN_PLACE = (symbolic_cpu.STORE_, symbolic_cpu.ROUND_)
_CPU_REFERENCES: Mapping[object, Callable[..., _Compared]] = {
    symbolic_cpu.STORE: _store,
    symbolic_cpu.STORE_: _store,
    symbolic_cpu.ROUND: _round,
    symbolic_cpu.ROUND_: _round,
    symbolic_cpu.LOAD: _load,
}
