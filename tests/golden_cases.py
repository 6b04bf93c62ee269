"""The cases whose pass texts are golden, and the text of what a pass does in one: what it changes and what it decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from benchmarks.gpu.absent import plan_for
from fxprec.config.recipes import FP8
from fxprec.passes.analysis.saved_values import saved_values
from fxprec.passes.base import Work
from fxprec.passes.pass_report import PassReport
from fxprec.plan import Plan, Site
from fxprec.report.graph_text import graph_text
from tests.golden_model import make, make_gated, make_maximum
from tests.helpers import compiled, eager_backend, pipeline

TRACED = "traced"  # the name of the text that shows the graph before all passes
PARTITION = "partition"  # of the one that shows what the partition does


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compilation of the golden model, or of another, and the texts kept of it."""

    name: str
    what: str
    options: dict[str, Any]
    prepare: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    wants_input_gradient: bool = False
    make: Callable[[], tuple[nn.Module, Tensor]] = make
    shows: tuple[str, ...] | None = None
    """The passes that the case is there for; None: all of them."""

    def kept(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return those of its texts that are golden, each with its first line."""
        names = [name for name in texts if self.shows is None or name in self.shows]
        return {name: f"# {name}, case {self.name}: {self.what}\n{texts[name]}" for name in names}


def _on_h100(patch: pytest.MonkeyPatch) -> None:
    plan_for(patch, 90, traces_only=True)


CASES = (
    Case(
        name="real",
        what="fp8, native storage, on a CPU that multiplies bf16",
        options={"recipe": "fp8"},
    ),
    Case(
        name="blocks",
        what="as real, with int4 blocks for what only weight gradients are made of",
        options={"recipe": "fp8+int4"},
        shows=("choose-crossings",),
    ),
    Case(
        name="operands",
        what="nvfp4, whose GEMMs with a parameter round their operands to blocks",
        options={"recipe": "nvfp4"},
        shows=("block-gemms",),
    ),
    Case(
        name="budget",
        what="as real, with a peak budget of 75%, and a gradient of the input",
        options={"recipe": "fp8", "peak_budget": "75%"},
        wants_input_gradient=True,
        shows=(TRACED, "shorten-lives", "choose-crossings", PARTITION),
    ),
    Case(
        name="gpu",
        what="as real, on an H100, where GEMMs multiply codes",
        options={"recipe": "fp8", "gemms": "low"},
        prepare=_on_h100,
        shows=(TRACED, "widen-attention", "weigh-gemms", "carry-scales", "low-gemms"),
    ),
    Case(
        name="papers",
        what="hfp8, storage simulate, half of the elements low, partial sums in 1-6-9",
        options={"recipe": "hfp8", "storage": "simulate", "accumulator": "1-6-9", "low_ratio": 0.5},
        shows=("assign-precision", "insert-casts", "carry-scales", "narrow-accumulators"),
    ),
    Case(
        name="maximum",
        what="fp8, the larger of two linear layers",
        options={"recipe": "fp8"},
        make=make_maximum,
        shows=(TRACED, "compare-in-forward"),
    ),
    Case(
        name="gated",
        what="fp8 with smooth_swiglu, a gated layer and the projection behind it",
        options={"recipe": replace(FP8, smooth_swiglu=True)},
        make=make_gated,
        shows=(TRACED, "smooth-swiglu"),
    ),
    Case(
        name="exact",
        what="the step in which policy exact measures damage, on a CPU",
        options={"recipe": "fp8", "policy": "exact"},
        shows=("insert-observers",),
    ),
)


class _Enough(Exception):
    """Ends a compilation once the passes have run."""


def texts_of(case: Case) -> dict[str, str]:
    """Trace the golden model, run the passes of one case, and return the text of each that changes or decides something.

    Under `TRACED` comes the graph before all passes.
    """
    found = dict[str, str]()
    run = pipeline.run

    def watched(work: Work, *passes: Any) -> None:
        before = _lines(work)
        found[TRACED] = _text(before)

        def after(report: PassReport, work: Work) -> None:
            nonlocal before
            now = _lines(work)
            if now != before:
                counts = [f"# {name}: {was} -> {is_}" for name, (was, is_) in report.changed.items()]
                found[report.name] = _text([*counts, *_difference(before, now)])
            before = now

        run(work, *passes[:1], observer=after)
        if work.has("plan") and (cut := list(_cut(work))):
            found[PARTITION] = _text(cut)
        raise _Enough

    with pytest.MonkeyPatch.context() as patch, mock.patch.object(pipeline, "run", watched):
        case.prepare(patch)
        model, x = case.make()
        with pytest.raises(Exception, match="_Enough"):
            compiled(model, eager_backend(**case.options))(x.requires_grad_(case.wants_input_gradient))
    return found


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


def _difference(before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    """Yield the lines that go and come, with one line around each run of them.

    Line numbers are left out: a line more at the top would change all of them.
    """
    for line in list(unified_diff(before, now, n=1, lineterm=""))[2:]:
        yield "..." if line.startswith("@@") else line


def _lines(work: Work) -> list[str]:
    """Return the graph as a dump shows it, then what the passes have decided so far."""
    return [*graph_text(work, "", {}).splitlines()[3:], *_decisions(work)]


def _decisions(work: Work) -> Iterator[str]:
    if work.has("operators"):
        yield from (f"operator {op.name}: {op.aten}, backward {_names(op.backward)}" for op in work.operators.all)
    if work.has("grouped"):
        yield from _groups(work)
    if work.has("assignment"):
        yield from _low(work)
    if work.has("book"):
        yield from map(_site, work.book.sites)
    if work.answers:
        gemms = zip(work.grouped.gemms, work.answers, strict=True)
        yield from (f"GEMM {op.name} pays over codes: {a.pays}, {a.why}" for op, a in gemms if a.pays is not None)
    if work.scales is not None:
        yield from (f"variable {i}: {variable}" for i, variable in enumerate(work.scales.variables))
        yield from map(str, work.scales.slots)
    if work.peak is not None:
        peak = work.peak
        yield f"peak: {peak.planned} bytes, {peak.high} with all kept high; kept without a site: {', '.join(peak.kept)}"
    if work.has("plan"):
        yield from _plan(work.plan)
    yield from (f"note: {text}" for text in work.remarks)
    yield from (f"notice: {notice.site}: {notice.detail}" for notice in work.notices)


def _cut(work: Work) -> Iterator[str]:
    """Say what crosses to backward, where torch's min-cut does not choose it."""
    if work.has_crossings:
        yield from (f"crosses: {node.name}" for node in saved_values(work.joint))


def _names(nodes: Sequence[Any]) -> str:
    return ", ".join(node.name for node in nodes) or "none"


def _groups(work: Work) -> Iterator[str]:
    for group in range(work.grouped.num_groups):
        tensors = ", ".join(f"{t.name} ({t.kind})" for t in work.grouped.tensors if t.group == group)
        yield f"group {group}: {work.grouped.group_size(group)} elements, {tensors}"


def _low(work: Work) -> Iterator[str]:
    chosen = work.assignment
    for group, position in chosen.order.items():
        yield f"group {group}: number {position} to demote, {'low' if group in chosen.low_groups else 'high'}"
    yield f"low ratio {chosen.achieved_ratio:.4f} by policy {chosen.policy}"


def _site(site: Site) -> str:
    fmt = f"{site.format} as {site.saved_as}" if site.saved_as else site.format
    said = [f"site {site.id}: {site.tensor} ({site.kind}) {fmt}", f"read by {site.reads}", site.way, site.why]
    return ", ".join(filter(None, said))


def _plan(plan: Plan) -> Iterator[str]:
    yield f"plan: {plan.summary()}"
    yield from (f"plan: GEMM {g.id} {g.op}, groups {g.group_before} and {g.group_after}" for g in plan.gemms)
    yield from (f"plan: group {g.id} saves {g.saved_bytes} bytes" for g in plan.groups)
    yield from (f"plan: note {note}" for note in plan.notes)
