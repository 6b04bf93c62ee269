"""Choose how one captured graph is lowered: by availability, by estimated time, and by which kernels fail.

``lowering="auto"`` on a GPU lowers each half both ways and keeps the one that is estimated to take less time. Both give
the same numbers, bit for bit if the kernels are exact (docs/triton.md). The estimate depends only on the graph and the
device's figures, so every process makes the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.fx import GraphModule

from fxprec import compat
from fxprec.compat import copied
from fxprec.config import Config
from fxprec.driver.wrappers import Run
from fxprec.errors import first_line
from fxprec.kernels.coded_gemms import kernel_called
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.notice import Notice
from fxprec.plan.rows import HalfLowering, LoweringChoice, LoweringEstimate, Moved

if TYPE_CHECKING:
    from fxprec.driver.verify import Fault
    from fxprec.passes.analysis.gemm_costs import Costs
    from fxprec.passes.analysis.traffic.estimate import Traffic

Way = Literal["inductor", "triton"]
_WAYS: tuple[Way, ...] = ("inductor", "triton")
Lower = Callable[[GraphModule, str, frozenset[str]], Lowered]
"""Lowers a half in place, by the named lowering and without the named kernels, and describes the result."""
INSTEAD = "Inductor compiles its casts: the same numbers, with one more pass over memory for each statistic"
DECODED = (
    "Inductor decodes the operands, and torch multiplies as with gemms='high': the same memory, at the speed of high "
    "precision"
)
_ON_CPU = "a CPU runs Inductor's loops and fxprec's C++ kernels; generated Triton kernels are for GPUs"
_LESS = "the estimate gives it less time for launches and for bytes outside GEMMs"


class LoweringChooser:
    """The choice between Inductor's and Triton's lowering, for each half of one captured graph on its device."""

    def __init__(self, device: torch.device, asked: str = "auto") -> None:
        self.device, self.asked = device, asked
        self.halves: dict[str, HalfLowering] = {}
        self.failed: str | None = None
        """Why a half could not be estimated; None if nothing failed."""

    def why_inductor(self) -> str | None:
        """Return why only Inductor's lowering is possible, or None if there is a choice."""
        return self.failed or (_ON_CPU if self.device.type == "cpu" else compat.no_triton(self.device))

    def lower(self, gm: GraphModule, lower: Lower, without: frozenset[str], half: str) -> tuple[GraphModule, Lowered]:
        """Lower copies of ``gm`` both ways, and return the one with the lower estimated time."""
        from fxprec.passes.analysis import gemm_costs  # imported here: a start from the cache lowers nothing
        from fxprec.passes.analysis.traffic.estimate import traffic_of

        gpu = gemm_costs.gpu_of(self.device)
        assert gpu is not None
        graphs = {way: copied(gm) for way in _WAYS}
        lowered = {way: lower(graphs[way], way, without) for way in _WAYS}
        found = _cheaper({way: traffic_of(graphs[way].graph) for way in _WAYS}, gemm_costs.costs_of(gpu))
        self.halves[half] = found
        return graphs[found.chosen], lowered[found.chosen]

    def for_plan(self) -> LoweringChoice | None:
        """Return the plan's entry for the halves lowered so far; None before the first half, if there is a choice."""
        if not self.halves:
            why = self.why_inductor()
            return None if why is None else LoweringChoice(asked=self.asked, chosen="inductor", why=why)
        chosen = {half.chosen for half in self.halves.values()}
        name = chosen.pop() if len(chosen) == 1 else "mixed"
        return LoweringChoice(
            asked=self.asked, chosen=name, why=self.failed or _LESS, estimate=LoweringEstimate(**self.halves)
        )


def _cheaper(found: Mapping[Way, Traffic], costs: Costs) -> HalfLowering:
    moved = {
        way: Moved(launches=traffic.launches, bytes=traffic.bytes, seconds=traffic.seconds(costs))
        for way, traffic in found.items()
    }
    chosen: Way = "triton" if moved["triton"].seconds < moved["inductor"].seconds else "inductor"
    return HalfLowering(chosen=chosen, inductor=moved["inductor"], triton=moved["triton"])


class Lowering:
    """The lowering of one captured graph, and the generated kernels that turned out not to work.

    ``tell`` warns and records an event, or raises under ``strict``.
    """

    def __init__(self, config: Config, device: torch.device, tell: Callable[[Notice], None]) -> None:
        self.config, self.device, self.tell = config, device, tell
        self.name = self._available()
        self.chooser = LoweringChooser(device, config.lowering) if self.name == "auto" else None
        self.without: frozenset[str] = frozenset()
        self._told = False
        self.is_stale = False
        """Whether a kernel failed in a run, so that the graph must be lowered again."""
        if config.verify and not self.verifies:
            tell(
                Notice("verify=True", f"nothing is compared: lowering 'eager' on {device.type} is the reference itself")
            )

    def _available(self) -> str:
        if self.config.lowering != "triton":
            return self.config.lowering
        reason = compat.no_triton(self.device)
        if reason is None:
            return "triton"
        self.tell(Notice("lowering='triton'", f"{reason}; lowered as 'auto' instead, without generated kernels"))
        return "auto"

    def compile(
        self, gm: GraphModule, lower: Lower, build: Callable[[GraphModule], Run], name: str = "forward"
    ) -> Half:
        """Lower the half called ``name`` and build it; if kernels do not compile, repeat without those kernels."""
        may_fail = self.name == "triton" or self.config.verify or self.device.type == "cuda"
        plain = copied(gm) if may_fail else gm
        while True:  # what replaces a kernel that fails may fail too
            gm, lowered = self.lower(gm, lower, name)
            if self.device.type == "cuda" and self._drop_gemms_that_fail(gm):
                gm = copied(plain)
                continue
            self._tell_what_is_not_compared(gm)
            kept = copied(gm) if self._has_first_run else None
            try:
                return Half(self, lowered, build(gm), None if kept is None else (plain, kept))
            except Exception as error:  # anything Triton or Inductor raises; not fxprec's if no kernel is generated
                if not lowered.generated.kernels:
                    raise
                self._drop_what_fails(lowered, error)
                gm = copied(plain)

    def _tell_what_is_not_compared(self, gm: GraphModule) -> None:
        if not self.verifies or self.name == "triton" or self._told:
            return
        from fxprec.driver.verify import is_compared

        if not is_compared(gm):
            self._told = True
            detail = "nothing is compared in a graph half whose casts Inductor compiles into its own loops"
            way = "lowering='triton'" if self.device.type == "cuda" else "on_nonfinite='report'"
            self.tell(Notice("verify=True", f"{detail}; {way} has kernels to compare"))

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, on a CPU."""
        return self.name == "triton" and self.device.type == "cpu"

    @property
    def makes_code(self) -> bool:
        """Whether Inductor's code runs from the first run on, so that the cache can store it."""
        return self.name != "eager" and not self._has_first_run

    @property
    def _has_first_run(self) -> bool:
        """Whether the first run differs from later runs: it is verified, or can fall back."""
        return self.is_interpreted or self.verifies

    @property
    def verifies(self) -> bool:
        """Whether the first run is compared with the reference, which 'eager' itself is."""
        return self.config.verify and self.name != "eager"

    def lower(self, gm: GraphModule, lower: Lower, half: str) -> tuple[GraphModule, Lowered]:
        """Lower one half, in place or in a copy, and return it. On a GPU ``"auto"`` takes the faster estimate."""
        if self.chooser is not None and self.chooser.why_inductor() is None:
            try:
                return self.chooser.lower(gm, lower, self.without, half)
            except Exception as error:  # a failed estimate must not stop the compilation
                self.chooser.failed = f"no estimate of the {half} half: {first_line(error)}"[:200]
                self.tell(Notice("lowering='auto'", f"{self.chooser.failed}; lowered as 'inductor' instead"))
        lowered = lower(gm, self.name, self.without)
        for place, why in lowered.generated.left:
            self.tell(Notice(f"kernel at {place}", f"no kernel is generated: {why}; {INSTEAD}"))
        return gm, lowered

    def _drop_what_fails(self, lowered: Lowered, error: Exception) -> None:
        """Drop the generated kernels that Triton cannot compile or start; if each compiles alone, drop all."""
        from fxprec.driver.verify import Fault
        from fxprec.numerics import ahead

        kernels = lowered.generated.kernels
        unstarted, name = compat.why_not_started(error), compat.kernel_running(error)
        if unstarted is not None and name in {k.name for k in kernels}:
            assert name is not None
            self.drop([Fault(name, f"it compiles but cannot be launched: {unstarted}")])
            return
        compiled = {k.name: ahead.why_not_generated(k.source, k.name, k.parameters, k.num_warps) for k in kernels}
        faults = [Fault(kernel, why) for kernel, why in compiled.items() if why is not None]
        cause = f"the graph did not compile with it: {first_line(error)}"
        self.drop(faults or [Fault(k.name, cause) for k in kernels])

    def _drop_gemms_that_fail(self, gm: GraphModule) -> bool:
        """Compile the kernels around GEMMs, which are not part of Inductor's code; return whether any was dropped."""
        if not any(kernel_called(node) is not None for node in gm.graph.nodes):
            return False
        from fxprec.driver.kernels_ahead import failing_kernels  # imports Triton

        failing = failing_kernels(gm.graph, self.device)
        for kernel, why in sorted(failing.items(), key=lambda item: item[0].name):
            instead = INSTEAD if kernel.kind == "totals" else DECODED
            self.tell(Notice(f"kernel {kernel.name}", f"{why}; {instead}"))
        self.without |= {kernel.name for kernel in failing}
        return bool(failing)

    def drop(self, faults: list[Fault]) -> None:
        """Drop kernels, with a warning each. A wrong kernel of the CPU lowering makes the graph fall back to eager."""
        is_generated = self.name == "triton" or self.device.type == "cuda"
        for fault in {fault.kernel: fault for fault in faults}.values():
            instead = "lowered as 'eager' from the next step on, many times slower"
            if is_generated:
                instead = DECODED if fault.multiplies else INSTEAD
            self.tell(Notice(f"kernel {fault.kernel}", f"{fault.reason}; {instead}"))
        self.without |= {fault.kernel for fault in faults}
        if not is_generated:
            self.name = "eager"


class Half:
    """The compiled forward or backward of a graph. Its first run may be verified."""

    def __init__(
        self, lowering: Lowering, lowered: Lowered, run: Run, first: tuple[GraphModule, GraphModule] | None
    ) -> None:
        compat.boxed(self)
        self.lowering, self.lowered, self.run = lowering, lowered, run
        self._first = first  # the graph before and after lowering, until the first run

    @property
    def has_first_run(self) -> bool:
        """Whether the next run is the first one, which may be verified or fall back."""
        return self._first is not None

    def __call__(self, args: list[Any]) -> Any:
        """Run one half. The first run may be compared with the reference, or fall back to it."""
        if self._first is None:
            return self.run(args)
        (plain, gm), self._first = self._first, None
        if self.lowering.config.verify:
            return self._checked(plain, gm, args)
        kept = list(args)
        try:
            return self.run(args)
        except Exception:  # a kernel failed in Triton's interpreter: the checked run names and drops it
            return self._checked(plain, gm, kept)

    def _checked(self, plain: GraphModule, gm: GraphModule, args: list[Any]) -> Any:
        from fxprec.driver.verify import checked_run

        taken = list(args)
        args.clear()
        results, faults = checked_run(gm, plain, self.lowered, taken)
        if faults:
            self.lowering.is_stale = True
            self.lowering.drop(faults)
        return results


def interpreted_kernels(run: Run) -> Run:
    """Return ``run`` without NumPy's warnings of inf and NaN: Triton's interpreter computes with NumPy."""

    def call(args: list[Any]) -> Any:
        with np.errstate(all="ignore"):
            return run(args)

    return compat.boxed(call)
