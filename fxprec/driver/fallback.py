"""Lowering ``triton`` of one captured graph: whether it can be had, what falls back and why, and the first run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.fx import GraphModule

from fxprec import compat
from fxprec.config import Config
from fxprec.driver.capture import copied
from fxprec.driver.lowering_choice import LoweringChooser
from fxprec.ir.symbolic_gemms import kernel_called
from fxprec.passes.lowering.lowered import Lowered
from fxprec.passes.notice import Notice

if TYPE_CHECKING:
    from fxprec.driver.verify import Fault

log = logging.getLogger(__name__)
Compiled = Callable[..., Any]
INSTEAD = "Inductor expands its casts: the same numbers, a pass over memory more for each statistic"
DECODED = "Inductor decodes, and torch multiplies as if gemms='high': as much memory, at the speed of high precision"


class Lower(Protocol):
    """Lowers a copy of one half; ``without`` names kernels not to generate."""

    def __call__(self, gm: GraphModule, lowering: str, without: frozenset[str]) -> Lowered: ...


class Lowering:
    """How one captured graph is lowered, and which generated kernels turned out not to work.

    ``tell`` warns and records an event, or raises under ``strict``.
    """

    def __init__(self, config: Config, device: torch.device, tell: Callable[[Notice], None]) -> None:
        self.config, self.device, self.tell = config, device, tell
        self.name = self._available()
        self.chooser = LoweringChooser(device, config.lowering) if self.name == "auto" else None
        self.without: frozenset[str] = frozenset()
        self._told = False
        self.is_stale = False
        """Whether a kernel failed while it ran: the graph must be lowered again."""
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
        self, gm: GraphModule, lower: Lower, build: Callable[[GraphModule], Compiled], name: str = "forward"
    ) -> Half:
        """Lower the half of that name and build it; once more without the kernels that do not compile."""
        may_fail = self.name == "triton" or self.config.verify or self.device.type == "cuda"
        plain = copied(gm) if may_fail else gm
        gm, lowered = self.lower(gm, lower, name)
        while self.device.type == "cuda" and self._drop_gemms_that_fail(gm):  # what takes their place may fail too
            gm, lowered = self.lower(copied(plain), lower, name)
        self._tell_what_is_not_compared(gm)
        kept = copied(gm) if self._has_first_run else None
        try:
            run = build(gm)
        except Exception as error:  # whatever Triton or Inductor raises of a kernel; without kernels it is not ours
            if not lowered.generated.kernels:
                raise
            self._drop_what_fails(lowered, error)
            gm, lowered = self.lower(copied(plain), lower, name)
            kept = copied(gm) if self._has_first_run else None
            run = build(gm)
        return Half(self, lowered, run, None if kept is None else (plain, kept))

    def _tell_what_is_not_compared(self, gm: GraphModule) -> None:
        if not (self.config.verify and self.verifies) or self.name == "triton" or self._told:
            return
        from fxprec.driver.verify import is_compared

        if not is_compared(gm):
            self._told = True
            detail = "nothing is compared of a graph half whose casts are part of Inductor's own loops"
            way = "lowering='triton'" if self.device.type == "cuda" else "on_nonfinite='report'"
            self.tell(Notice("verify=True", f"{detail}; {way} has kernels to compare"))

    @property
    def is_interpreted(self) -> bool:
        return self.name == "triton" and self.device.type == "cpu"

    @property
    def makes_code(self) -> bool:
        """Whether what is compiled is Inductor's code from the first run on, and can be stored."""
        return self.name != "eager" and not self._has_first_run

    @property
    def _has_first_run(self) -> bool:
        """Whether the first run differs from others: checked, or able to fall back."""
        return self.is_interpreted or (self.config.verify and self.verifies)

    @property
    def verifies(self) -> bool:
        """Whether ``verify`` has something to compare with the reference: not the reference itself."""
        return self.name != "eager"

    def lower(self, gm: GraphModule, lower: Lower, half: str) -> tuple[GraphModule, Lowered]:
        """Lower one half, in place or in a copy, and return that. On a GPU ``"auto"`` takes what should cost less."""
        if self.chooser is not None and self.chooser.why_inductor() is None:
            try:
                return self.chooser.lower(gm, lower, self.without, half)
            except Exception as error:  # an estimate is no reason to compile nothing
                cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                self.chooser.failed = f"no estimate of the {half} half: {cause}"[:200]
                self.tell(Notice("lowering='auto'", f"{self.chooser.failed}; lowered as 'inductor' instead"))
        lowered = lower(gm, self.name, self.without)
        for place, why in lowered.generated.left:
            self.tell(Notice(f"kernel at {place}", f"no kernel is generated: {why}; {INSTEAD}"))
        return gm, lowered

    def _drop_what_fails(self, lowered: Lowered, error: Exception) -> None:
        """Find the kernels that Triton cannot compile; where it compiles each by itself, drop all."""
        from fxprec.driver.verify import Fault
        from fxprec.numerics import ahead

        kernels = lowered.generated.kernels
        unstarted, name = compat.why_not_started(error), compat.kernel_running(error)
        if unstarted is not None and name in {k.name for k in kernels}:
            assert name is not None
            self.drop([Fault(name, f"it compiles and cannot start: {unstarted}")])
            return
        faults = []
        for k in kernels:
            why = ahead.why_not_generated(k.source, k.name, k.parameters, k.num_warps)
            if why is not None:
                faults.append(Fault(k.name, why))
        cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self.drop(faults or [Fault(k.name, f"the graph did not compile with it: {cause}") for k in kernels])

    def _drop_gemms_that_fail(self, gm: GraphModule) -> bool:
        """Compile the kernels around GEMMs, which are no part of Inductor's code; say whether one has to go."""
        kernels = {kernel for node in gm.graph.nodes if (kernel := kernel_called(node)) is not None}
        if not kernels:
            return False
        from fxprec.runtime.gemm.kernels import why_not_compiled  # imports Triton

        major, minor = torch.cuda.get_device_capability(self.device)
        asked = sorted(kernels, key=lambda k: k.name)
        log.info("compiling %d kernels around GEMMs for compute capability %d.%d", len(asked), major, minor)
        with ThreadPoolExecutor(min(len(asked), os.cpu_count() or 1)) as pool:  # most of it in ptxas and in LLVM
            causes = [*pool.map(lambda kernel: why_not_compiled(kernel, 10 * major + minor), asked)]
        failing = set()
        for kernel, why in zip(asked, causes, strict=True):
            if why is not None:
                instead = INSTEAD if kernel.kind == "totals" else DECODED
                self.tell(Notice(f"kernel {kernel.name}", f"{why}; {instead}"))
                failing.add(kernel.name)
        self.without |= failing
        return bool(failing)

    def drop(self, faults: list[Fault]) -> None:
        """Do without kernels, and say so. A wrong kernel of the CPU lowering has only the reference to fall back to."""
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
    """The forward or the backward of a graph, compiled. Its first run may be a checked one."""

    def __init__(
        self, lowering: Lowering, lowered: Lowered, run: Compiled, first: tuple[GraphModule, GraphModule] | None
    ) -> None:
        compat.boxed(self)
        self.lowering, self.lowered, self.run = lowering, lowered, run
        self._first = first  # the graph before and after lowering, until the first run is over

    @property
    def has_first_run(self) -> bool:
        return self._first is not None

    def __call__(self, args: list[Any]) -> Any:
        if self._first is None:
            return self.run(args)
        (plain, gm), self._first = self._first, None
        if self.lowering.config.verify:
            return self._checked(plain, gm, args)
        kept = list(args)
        try:
            return self.run(args)
        except Exception:  # of a kernel in the interpreter: the checked run names it and does without
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


def interpreted_kernels(run: Compiled) -> Compiled:
    """Run generated kernels in Triton's interpreter: NumPy, whose warnings of inf and NaN mean nothing here."""

    def call(args: list[Any]) -> Any:
        with np.errstate(all="ignore"):
            return run(args)

    return compat.boxed(call)
