"""Compile one captured graph with ``compile_fx``: take the code from the cache, or run the passes in its callbacks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, GraphModule

import fxprec.runtime.arith.gemm_ops
import fxprec.runtime.cpu.blocks
import fxprec.runtime.cpu.layout
import fxprec.runtime.cpu.ops
import fxprec.runtime.cpu.wide_gemms
import fxprec.runtime.gemm.ops
import fxprec.runtime.gemm.reference_ops
import fxprec.runtime.grouped_mm
import fxprec.runtime.host
import fxprec.runtime.reference_ops
import fxprec.runtime.scaled_mm  # noqa: F401  all register implementations
from fxprec import compat
from fxprec.config import Config
from fxprec.driver import progress
from fxprec.driver.attempts import can_confirm, confirmed
from fxprec.driver.capture import Captured
from fxprec.driver.compiled import Compiled, Retry, Stop
from fxprec.driver.compiler import Attempt, Compiler
from fxprec.driver.warm_start import KnownHalf, repeat_events, sources
from fxprec.driver.wrappers import Run, entered, ranged
from fxprec.errors import BudgetError
from fxprec.passes.name_grouped import name_grouped
from fxprec.passes.narrow_attention import narrow_attention
from fxprec.plan import PeakBytes, Plan

if TYPE_CHECKING:
    from fxprec.driver.joint_compilation import JointCompilation

log = logging.getLogger(__name__)  # TORCH_LOGS="fxprec" shows it, "+fxprec" the passes too


def compile_graph(compiler: Compiler, captured: Captured, given: Plan | None, step: int) -> Compiled:
    """Compile with the plan ``given``, or solve for one. Repeat if the plan breaks a budget or the table is small.

    ``step`` is the step that events are noted for. Raises `BudgetError`, which names a budget that compiling confirms.
    """
    try:
        return _compile_graph(compiler, captured, given, step)
    except BudgetError as error:
        if given is not None or not can_confirm(compiler, error):
            raise
        raise confirmed(error, compiler, lambda trial: _compile_graph(trial, captured, None, step)) from None


def _compile_graph(compiler: Compiler, captured: Captured, given: Plan | None, step: int) -> Compiled:
    verb = "compiling" if captured.identity.is_training else "compiling for evaluation:"
    with captured.tracing() as examples, progress.telling(f"{verb} {compiler.log.name}"):
        fixed = compiler.budget.fixed  # an activation budget's attempts share a key, and only the last is stored
        while True:
            start = time.perf_counter()
            key = compiler.key(captured, given, fixed)
            try:
                found = Compilation(compiler, captured, given, step, key).compile(examples)
            finally:
                compiler.tried.append(time.perf_counter() - start)
            if isinstance(found, Compiled):
                return replace(found, assumes=captured.guards_since_dynamo())
            captured = replace(captured, capacity=found.capacity)


def look(compiler: Compiler, captured: Captured, step: int) -> PeakBytes | None:
    """Run the passes without compiling, and return the peak bytes under other budgets."""
    with captured.tracing() as examples:
        attempt = Compilation(compiler, captured, None, step, None, only_looks=True)
        attempt.compile(examples)
    return None if attempt.traced is None else attempt.traced.peak


@dataclass
class Compilation(Attempt):
    """One attempt to compile a graph, from the cache or by tracing."""

    traced: JointCompilation | None = None  # None if the code comes from the cache
    found: list[KnownHalf] = field(default_factory=list)  # the halves that come from the cache

    def compile(self, examples: Sequence[Any]) -> Compiled | Retry:
        """Return the compiled graph, or the `Retry` of another attempt. Raises whatever Inductor raises."""
        gm, table = self.captured.with_table()
        self._prepare(gm)
        try:
            with compat.stored_autograd(self._load if self.key else None), self._whole_step():
                run = self._compile_fx(gm, [*examples, table])
        except Stop as stop:
            return stop.retry
        return self._from_cache(run) if self.traced is None else self.traced.finished(run)

    def _compile_fx(self, gm: GraphModule, examples: Sequence[Any]) -> Run:
        settings = self.compiler.settings
        run: Run = compat.compile_fx(
            gm,
            examples,
            inner_compile=self._compile_half,
            decompositions=None if settings.accumulator is None else compat.whole_gemms(),
            config_patches=compat.mode_settings(settings.asked.mode)
            | (compat.ROUNDED_AT_EVERY_OPERATOR if settings.recipe.pure else {})
            | {
                "joint_custom_pre_pass": compat.GraphPass(self._run_passes, self.key or sources()),
                "custom_partitioner_fn": compat.Partitioner(self._partition, sources()),
            },
        )
        return run

    def _prepare(self, gm: GraphModule) -> None:
        """Edit the captured graph before torch traces it, which fixes attention's kernel and how experts are traced."""
        name_grouped(gm)
        captured = self.captured
        stays = narrow_attention(gm, captured.device, self.compiler.settings, is_training=captured.identity.is_training)
        if stays is not None:
            self.compiler.log.warn_once(stays.site, stays.detail, step=self.step)
        for site, why in compat.without_effect(is_cut=self._fits_peak):
            self.compiler.log.warn_once(site, why, step=self.step)

    @property
    def _fits_peak(self) -> bool:
        asked = self.compiler.settings.peak_budget if self.given is None else self.given.peak_bytes
        return asked is not None

    def _whole_step(self) -> contextlib.AbstractContextManager[None]:
        """Compile both halves at once if a peak budget bounds both, or if the plan must say how each is lowered."""
        chooser = self.compiler.lowering.chooser
        chooses = chooser is not None and chooser.why_inductor() is None
        return compat.backward_at_once() if self._fits_peak or chooses else contextlib.nullcontext()

    def _tracing(self) -> JointCompilation:
        if self.traced is None:
            from fxprec.driver.joint_compilation import (
                JointCompilation,  # imports every pass, which a start from the cache does not need
            )

            inputs = self.compiler, self.captured, self.given, self.step, self.key
            self.traced = JointCompilation(*inputs, only_looks=self.only_looks)
        return self.traced

    def _run_passes(self, graph: Graph) -> None:
        self._tracing().run_passes(graph)

    def _partition(self, gm: GraphModule, inputs: Sequence[object], **options: object) -> compat.Halves:
        return self._tracing().partition(gm, inputs, **options)

    def _compile_half(self, gm: GraphModule, examples: Sequence[Any], **options: object) -> Run:
        return self._tracing().compile_half(gm, examples, **options)

    def _load(self, known: KnownHalf, run: Run) -> Run:
        """Return a half that comes from the cache, with the same wrappers as a compiled one."""
        self.found.append(known)
        compiler = self.compiler
        run = ranged(run, compiler.log.name, known.name)
        run = compiler.wrapped(run, known.name, known.lowered, known.num_outputs)
        return entered(run, known.lowered, known.donated, compiler.controller)

    def _from_cache(self, run: Run) -> Compiled | Retry:
        """Return the cached graph with ``run`` as its code, and repeat the notices that its compilation gave.

        Code that exceeded its peak budget is in the cache too: it is refused again, and the next attempt has its key.
        """
        for half in self.found:
            repeat_events(self.compiler.log, half.said, self.step)
        known = self.within_peak(self.found[-1].graph, self.found[-1].peak)
        if known is None:
            return Retry(self.captured.capacity)
        if known.plan is not None:
            log.info("%s: from the cache: %s", self.compiler.log.name, known.plan.summary())
        return replace(known, run=run)


def compile_unplanned(gm: GraphModule, examples: Sequence[Any], config: Config) -> Callable[..., Any]:
    """Return the code of a graph that has nothing to round, by Inductor or, if asked for, by the reference lowering."""
    settings = compat.mode_settings(config.mode)
    result: Callable[..., Any]
    if config.lowering != "eager":
        result = compat.compile_fx(gm, examples, config_patches=settings)
        return result
    from fxprec.driver.interpreter import interpreted  # imported here: a start from the cache imports no pass

    with compat.stored_autograd(None):
        result = compat.compile_fx(gm, examples, lambda half, *_, **__: interpreted(half), config_patches=settings)
    return result
