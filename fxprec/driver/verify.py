"""Compare each kernel's output with the reference in the first run of a lowered graph (``verify=True``).

The lowered graph runs node by node. Each kernel gets the reference's values as input, and later nodes get the
reference's result. So one wrong kernel is one fault, and the returned results are correct in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from fxprec import compat
from fxprec.driver.interpreter import runnable
from fxprec.driver.verify_references import (
    GEMMS,
    REFERENCES,
    Checked,
    Reference,
    difference,
    name_of,
    statistics_differ,
)
from fxprec.errors import first_line
from fxprec.ir import symbolic
from fxprec.ir.calls import FakeCall, call_of
from fxprec.ir.symbolic import Quantize
from fxprec.kernels import casts
from fxprec.kernels.casts import LoadBlocks, StoreBlocks
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.stats import WIDTH
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.lowering.blocks import BlockCall
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.lowering.stats import watch
from fxprec.passes.lowering.triton.kernel import Kernel

aten = torch.ops.aten


@dataclass(frozen=True)
class Fault:
    """A kernel whose output differs from the reference, or that does not run."""

    kernel: str
    reason: str
    multiplies: bool = False
    """Whether the kernel is a GEMM."""


def checked_run(
    lowered_gm: GraphModule, plain: GraphModule, lowered: Lowered, args: Sequence[Any]
) -> tuple[list[Any], list[Fault]]:
    """Run a half's kernels and plain torch; return the reference's results, and the faults.

    ``plain`` is the graph before lowering. If the graph writes to its inputs, ``args`` are modified, as in any run.
    """
    num_outputs = len(results_of(plain.graph))
    with torch.no_grad(), np.errstate(all="ignore"):
        wanted = None
        if lowered.generated.kernels:
            wanted = _Reference(runnable(plain), lowered)
            devices = {x.device for x in args if isinstance(x, torch.Tensor) and x.device.type == "cuda"}
            with torch.random.fork_rng(devices):  # so that both draw the same dropout
                wanted.run(*map(_copied, args))
        checker = _Checker(runnable(lowered_gm), lowered.generated.kernels, wanted)
        results = list(checker.run(*args))
    statistics = None if wanted is None else wanted.statistics
    if statistics is not None:
        checker.compare_statistics(statistics, results[num_outputs], lowered)
        results[num_outputs] = torch.cat([statistics, results[num_outputs][statistics.numel() :]])
    return results, checker.faults


def is_compared(lowered_gm: GraphModule) -> bool:
    """Return whether a lowered graph calls a kernel of fxprec; casts inside Inductor's loops do not count."""
    known = {compat.TritonCalls.target, *REFERENCES, *CPU_REFERENCES}
    return any(node.target in known for node in lowered_gm.graph.nodes)


def _copied(value: object) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class _Reference(Interpreter):
    """An interpreter of the symbolic graph that keeps the values of kernels' outputs, and the counts of their rows."""

    def __init__(self, plain: GraphModule, lowered: Lowered) -> None:
        rows, nodes = watch(plain, lowered.generated.watched)
        super().__init__(plain)
        self.kept = {argument.origin for kernel in lowered.generated.kernels for argument in kernel.outputs}
        self.values: dict[str, torch.Tensor] = {}
        self.formats: dict[str, Format] = {}
        self.row_of = dict(zip(nodes, rows, strict=True))
        self.by_row: dict[int, torch.Tensor] = {}
        self.order = lowered.generated.watched

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.name in self.kept:
            self.values[n.name] = result
            if (cast := Quantize.match(n)) is not None:
                self.formats[n.name] = parse(cast.format)
        if n in self.row_of:
            self.by_row[self.row_of[n]] = result
        return result

    @property
    def statistics(self) -> torch.Tensor | None:
        """Rows of counts, flat, in the order in which the kernels count; None if they count nothing."""
        return torch.cat([self.by_row[row] for row in self.order]) if self.order else None


class _Checker(Interpreter):
    """An interpreter of the lowered graph that compares each kernel's results, then continues with the reference's."""

    def __init__(self, gm: GraphModule, kernels: Sequence[Kernel], wanted: _Reference | None) -> None:
        super().__init__(gm)
        self.calls = iter(kernels)
        self.wanted, self.faults = wanted, list[Fault]()

    def run_node(self, n: Node) -> Any:
        if n.target is compat.TritonCalls.target:
            block = BlockCall.of(n)
            return self._run_region(n) if block is None else self._run_blocks(n, block)
        if n.target in CPU_REFERENCES:
            return self._run_in_place(n)
        reference = REFERENCES.get(n.target)
        if reference is not None:
            return self._run_call(n, reference)
        if n.target is aten.view.default:  # strides may differ from those traced, so a view may need a copy
            args, _ = self.fetch_args_kwargs_from_env(n)
            return args[0].reshape(args[1])
        return super().run_node(n)

    def _run_region(self, n: Node) -> Any:
        kernel = next(self.calls)
        assert self.wanted is not None
        expected = {a.name: self.wanted.values[a.origin].view(a.dtype) for a in kernel.outputs}
        try:
            found = super().run_node(n)
        except Exception as error:  # the compiler or the interpreter may raise anything
            self.faults.append(Fault(kernel.name, f"it does not run: {first_line(error)}"))
            counters = self.fetch_args_kwargs_from_env(n)[1]["kwargs"].get("counters")
            return expected | {"counters": counters}
        for argument in kernel.outputs:
            origin, mine = argument.origin, found[argument.name]
            fmt = None if mine.is_floating_point() else self.wanted.formats.get(origin)
            reason = difference(mine, expected[argument.name], origin, exact=kernel.is_exact, fmt=fmt)
            if reason is not None:
                self.faults.append(Fault(kernel.name, reason))
                break
        return found | expected

    def _run_blocks(self, n: Node, block: BlockCall) -> Any:
        given = self.fetch_args_kwargs_from_env(n)[1]["kwargs"]
        cast = (given.get("whole"), block.row, block.format)

        def compare(found: Mapping[str, torch.Tensor]) -> Checked:
            out = found["out"]
            if block.stores:
                return REFERENCES[StoreBlocks.target](out, given["x"], given.get("seed"), *cast)
            return REFERENCES[LoadBlocks.target](out, given["q"], *cast, out.numel(), out.dtype)

        return {"out": self._checked(n, block.kernel, compare).view(given["out"].shape)}

    def _run_call(self, n: Node, reference: Reference) -> Any:
        args = self.fetch_args_kwargs_from_env(n)[0]
        return self._checked(n, name_of(n, args), lambda found: reference(found, *args), multiplies=n.target in GEMMS)

    def _checked(self, n: Node, kernel: str, compare: Callable[[Any], Checked], *, multiplies: bool = False) -> Any:
        checked = compare(super().run_node(n))
        if checked.reason is not None:
            self.faults.append(Fault(kernel, f"{checked.reason} (node {n.name})", multiplies))
        return checked.wanted

    def _run_in_place(self, n: Node) -> Any:
        call = type(call_of(n)).with_tensors(*map(_copied, self.fetch_args_kwargs_from_env(n)[0]))
        found = super().run_node(n)
        overwritten = self.fetch_args_kwargs_from_env(n)[0][0] if n.target in IN_PLACE else None
        for name, mine, theirs in CPU_REFERENCES[n.target](found, overwritten, call):
            reason = difference(mine, theirs, name, exact=True)
            if reason is not None:
                self.faults.append(Fault(f"{n.name} ({n.target}, row {call.row})", reason))
                mine.copy_(theirs)
        return found

    def compare_statistics(self, wanted: torch.Tensor, found: torch.Tensor, lowered: Lowered) -> None:
        """Compare the rows that generated kernels count; they are the first rows of ``found``."""
        owner = {row: kernel for kernel in lowered.generated.kernels for row in kernel.watched}
        rows = found[: wanted.numel()].view(-1, WIDTH)
        inexact = [not owner[row].is_exact for row in lowered.generated.watched]
        of_inexact = torch.tensor(inexact, dtype=torch.bool, device="cpu")
        differ = statistics_differ(rows, wanted.view(-1, WIDTH), of_inexact).tolist()
        for row, is_wrong in zip(lowered.generated.watched, differ, strict=True):
            name = owner[row].name
            if is_wrong and name not in {fault.kernel for fault in self.faults}:
                self.faults.append(Fault(name, f"its statistics of row {row} differ from the reference's"))


# The kernels of a CPU, some of which overwrite their input.

_Compared = list[tuple[str, torch.Tensor, torch.Tensor]]


def _values(call: FakeCall) -> torch.Tensor:
    q = symbolic.QUANTIZE(call.x, call.table, call.row, call.format, call.storage)
    values = symbolic.DEQUANTIZE(q, call.table, symbolic.AS_STORED, call.format, call.storage, torch.float32)
    result: torch.Tensor = symbolic.KEEP_NONFINITE(values, call.x) if call.keep else values
    return result


def _store(found: Sequence[torch.Tensor], over: torch.Tensor | None, call: FakeCall) -> _Compared:
    codes = symbolic.QUANTIZE(call.x, call.table, call.row, call.format, call.storage)
    compared = [("its codes", found[0], codes)]
    values = found[1] if over is None else over
    if values.numel():
        compared.append(("its values", values, _values(call)))
    return compared


def _round(found: Sequence[torch.Tensor], over: torch.Tensor | None, call: FakeCall) -> _Compared:
    return [("its values", found[0] if over is None else over, _values(call))]


def _load(found: torch.Tensor, over: object, call: FakeCall) -> _Compared:
    storage = "native" if call.q.dtype.is_floating_point else "packed"
    values = symbolic.DEQUANTIZE(call.q, call.table, call.row, call.format, storage, torch.float32)
    return [("its values", found, values)]


IN_PLACE = (casts.STORE_, casts.ROUND_)
CPU_REFERENCES: Mapping[object, Callable[..., _Compared]] = {
    casts.STORE: _store,
    casts.STORE_: _store,
    casts.ROUND: _round,
    casts.ROUND_: _round,
    casts.LOAD: _load,
}
