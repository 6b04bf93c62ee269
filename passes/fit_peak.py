"""Keep, narrow or compute again what backward needs, so that the step never holds more than ``peak_budget``.

The choice is `analysis.peak`'s. Here it becomes real: a copy's format is changed, a copy is made that was not, or what
backward reads is computed again there, by nodes of its own that read what is kept. They are marked as backward's, and
read what is kept as it is through ``storing``, or AOTAutograd would find them equal to forward's and save those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxprec.errors import BudgetError, PlanError
from fxprec.ir.symbolic import AS_STORED, Dequantize, Quantize, Storing, stored_dtype
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.joint import operator_of, tensor_of
from fxprec.passes.analysis.peak.choice import Chooser, Fit
from fxprec.passes.analysis.peak.costs import Rates
from fxprec.passes.analysis.peak.curve import curve
from fxprec.passes.analysis.peak.kernels import can_repeat
from fxprec.passes.analysis.peak.needs import Needs, needs_of
from fxprec.passes.analysis.peak.other_sizes import other_sizes
from fxprec.passes.analysis.peak.problem import KEEP, NARROW, Problem
from fxprec.passes.analysis.peak.step import Held
from fxprec.passes.base import Work
from fxprec.passes.casts.sites import emit, emit_call, insertion_point_after, store_as
from fxprec.passes.notice import readable
from fxprec.plan.rows import PeakBytes, PeakPoint, Site, Way

_MOMENTS = 40  # drawn of each other budget
_CONVERT = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class FitPeak:
    """Choose a way for each value that backward needs; fill ``work.peak``."""

    name: str = "fit-peak"

    def apply(self, work: Work) -> None:
        if not work.fits_peak:
            return
        needs = needs_of(work)
        fit = _solved(work, needs) if work.given is None else _given(work, needs)
        assert work.peak is not None
        work.peak_sizes = other_sizes(fit.held, work.joint.graph, work.peak.room - work.peak_part.beyond)
        _Rewrite(work, needs, fit).run()
        work.remarks.append(_remark(needs, fit))
        _tell_of_graphs(work)
        if work.peak_sizes is not None:
            work.remarks.append(work.peak_sizes.note())


def _tell_of_graphs(work: Work) -> None:
    """Say whom the budget is shared with."""
    part = work.peak_part
    if part.is_provisional:
        work.remarks.append(
            "peak budget: the first step knows its graphs one by one, and this one holds the least there"
        )
    elif part.is_cut:
        work.remarks.append("peak budget: a graph break ends this graph, and what follows, not planned here, shares it")
    elif part.num_graphs > 1:
        assert part.budget is not None
        work.remarks.append(
            f"peak budget: {readable(part.budget)} are shared by {part.num_graphs} graphs of the step; while this one "
            f"runs, {readable(part.beside)} of others wait or are gradients, and of it at most "
            f"{readable(int(part.waiting))} wait"
        )


def _solved(work: Work, needs: Needs) -> Fit:
    """Choose for the budget. Raises `BudgetError` where none is found."""
    assert work.settings.peak_budget is not None
    part, rates = work.peak_part, Rates.of(work.joint.table.meta["val"].device)
    high = Chooser(Problem(needs, rates, ())).unlimited
    chooser = Chooser(Problem(needs, rates, work.settings.ways))
    budget = work.settings.peak_budget.bytes_of(high.peak) if part.budget is None else part.budget
    offers = part.shares or part.wants_curve  # to other graphs
    fits = curve(chooser, waiting=offers) if offers or work.looks_at_budgets else ()
    if part.is_provisional and work.settings.peak_budget.is_share:
        budget = max(budget, fits[-1].peak)  # of all graphs' together it will be a share
    fit = fits[-1] if part.is_provisional else chooser.within(part.bound(budget))
    if fit is None or fit.excess(part.bound(budget)) > 0:
        fit = min((chooser.least(), *fits), key=lambda fit: fit.peak)
        if fit.excess(part.bound(budget)) > 0:
            raise _out_of_reach(budget, fit.peak + part.beside + part.beyond, work, fit)
    sited = needs.rows.keys()
    kept = tuple(node.name for node in fit.held.saved if node not in sited)
    seconds = rates.step(needs.step)
    work.peak = PeakBytes(
        budget=budget,
        high=high.peak,
        planned=fit.peak + part.beyond,
        live=fit.held.live_by_kind(),
        kept=kept,
        graphs=part.num_graphs,
        beside=part.beside,
        waiting=fit.waiting + part.beyond_waiting,
        seconds=seconds + fit.seconds,
        points=tuple(_point(found, seconds) for found in (high, *fits)) if fits else (),
    )
    return fit


def _point(fit: Fit, seconds: float) -> PeakPoint:
    live = fit.held.live_by_kind(_MOMENTS)
    return PeakPoint(peak=fit.peak, waiting=fit.waiting, seconds=seconds + fit.seconds, live=live)


def _given(work: Work, needs: Needs) -> Fit:
    """Follow a plan's ways. Raises `PlanError` where they leave out what backward needs."""
    assert work.given is not None
    assert work.given.peak_bytes is not None
    saved: dict[Node, Format | None] = {}
    nodes = {row: node for node, row in needs.rows.items()}
    for site in work.given.sites:
        node = nodes.get(site.id, work.book.values.get(site.id))
        if node in needs.high and site.way in ("keep", "narrow"):
            is_low = site.way == "narrow" and site.promoted_at is None
            saved[node] = needs.low.get(node, needs.high[node]) if is_low else needs.high[node]
    kept = frozenset(work.given.peak_bytes.kept)
    saved |= dict.fromkeys(node for node in needs.high if node.name in kept)
    held = Held(needs.step, saved)
    for node, _ in held.repeated:
        if node not in needs.step.decoded and not can_repeat(node):
            raise PlanError(
                f"the given plan leaves out {node.name}, which backward needs and which cannot be computed again; give "
                "its site the way 'keep', or plan again"
            )
    work.peak = replace(work.given.peak_bytes, planned=held.peak, live=held.live_by_kind())
    narrow = {node for node, fmt in saved.items() if fmt is not None and fmt is needs.low.get(node)}
    return Fit(held, {node: NARROW if node in narrow else KEEP for node in saved}, 0.0)


def _remark(needs: Needs, fit: Fit) -> str:
    repeated = sum(n in needs.high for n, _ in fit.held.repeated)
    narrow = sum(way == NARROW for way in fit.ways.values())
    kept = len(fit.held.saved) - narrow
    return f"peak budget: {kept} values are kept, {narrow} kept in 8 bits, {repeated} computed again in backward"


def _out_of_reach(budget: int, least: int, work: Work, fit: Fit) -> BudgetError:
    ways = [f"raise it to {readable(least)}", "take a smaller batch"]
    if "recompute" not in work.settings.ways:
        ways.append("add 'recompute' to ways")
    if "narrow" not in work.settings.ways:
        ways.append("add 'narrow' to ways")
    elif not work.settings.recipe.has_low:
        ways.append(f"choose a recipe with a low format ({work.settings.recipe.name!r} has none)")
    return BudgetError(
        f"peak_budget is {readable(budget)}, and the least peak found holds {readable(least)}, {_what_holds(fit)} "
        f"among them; {', '.join(ways[:-1])} or {ways[-1]}"
    )


def _what_holds(fit: Fit) -> str:
    """Name the largest tensors that live at the peak, and what takes most of it."""
    timeline, held = fit.held.timeline, fit.held
    peak = max(range(len(timeline.live)), key=timeline.live.__getitem__)
    living = [i for i, born in timeline.born.items() if born <= peak <= timeline.dies[i]]
    largest = sorted(living, key=lambda i: -held.items[i].bytes)[:3]
    return ", ".join(f"{held.anchors[i].name} ({readable(held.items[i].bytes).partition(' (')[0]})" for i in largest)


@dataclass
class _Rewrite:
    work: Work
    needs: Needs
    fit: Fit
    new: dict[Node, Node] = field(default_factory=dict)  # what backward reads instead
    decoded: dict[Node, Node] = field(default_factory=dict)  # value -> its copy, read back

    def __post_init__(self) -> None:
        self.graph: Graph = self.work.joint.graph
        self.casts: dict[Node, list[tuple[Node, Quantize]]] = {}
        for q, cast in Quantize.among(Quantize.nodes(self.graph)):
            if any(x in self.needs.step.casts for x in q.users):
                self.casts.setdefault(cast.x, []).append((q, cast))

    def run(self) -> None:
        for node, fmt in self.fit.held.saved.items():
            self._keep(node, fmt)
        for node, reader in self.fit.held.repeated:
            self._repeat(node, reader)
        for reader in self.needs.step.backward:
            self._read_new(reader)
        for value, casts in self.casts.items():
            if value not in self.fit.held.saved:
                self._erase(q for q, _ in casts)
        self._tell_sites()

    def _keep(self, node: Node, fmt: Format | None) -> None:
        """Save a value as it is, or in a format."""
        if fmt is None:
            regions.mark(node, CheckpointPolicy.MUST_SAVE)
            for q, _ in self.casts.get(node, ()):
                for x, read in Dequantize.among(list(q.users)):
                    x.replace_all_uses_with(self._as(node, read.dtype, x))
            return
        for q, _ in self.casts.get(node, ()):
            store_as(fmt, q)
            self.decoded[node] = next(iter(q.users))
        if node not in self.casts:
            self.decoded[node] = self._store(node, fmt)

    def _store(self, node: Node, fmt: Format) -> Node:
        """Make a copy that was not; return it read back."""
        book, val = self.work.book, tensor_of(node)
        row = self.needs.rows[node]
        with self.graph.inserting_before(insertion_point_after(node).next):
            narrow = torch.empty_like(val, dtype=stored_dtype(fmt, book.storage))
            q = emit_call(self.graph, Quantize(node, book.table, row, fmt.name, book.storage), node, val=narrow)
            read = Dequantize(q, book.table, AS_STORED, fmt.name, book.storage, val.dtype)
            return emit_call(self.graph, read, node, val=val)

    def _as(self, node: Node, dtype: torch.dtype, before: Node) -> Node:
        if tensor_of(node).dtype == dtype:
            return node
        with self.graph.inserting_before(before):
            return emit(self.graph, _CONVERT, (node, dtype), node, val=tensor_of(node).to(dtype))

    def _repeat(self, node: Node, reader: Node) -> None:
        """Compute a value again before ``reader``, from what backward has."""
        if node in self.needs.step.casts or (
            node in self.needs.step.decoded and not any(self._changed(n) for n in node.all_input_nodes)
        ):
            return
        sources = {n: self._there(n, reader) for n in node.all_input_nodes}
        with self.graph.inserting_before(reader):
            again = emit(self.graph, operator_of(node), (), node, backward=True, val=node.meta.get("val"))
        again.args, again.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: sources[n])
        again.meta["partitioner_tag"] = "must_be_in_backward"
        self.new[node] = again

    def _changed(self, node: Node) -> bool:
        value = self.needs.step.casts.get(node)
        return node in self.new or (value is not None and value.x in self.new)

    def _there(self, node: Node, reader: Node) -> Node:
        """Return what a node that runs again reads in the place of ``node``."""
        if node in self.new:
            return self.new[node]
        cast = self.needs.step.casts.get(node)
        if cast is not None and cast.x in self.new:
            return self._as(self.new[cast.x], tensor_of(node).dtype, reader)
        if node in self.decoded:
            return self.decoded[node]
        if node.op == "placeholder" or (node in self.fit.held.saved and node not in self.needs.step.decoded):
            return self._barrier(node, reader)
        return node

    def _barrier(self, node: Node, reader: Node) -> Node:
        if not isinstance(node.meta.get("val"), torch.Tensor) or self._is_parameter(node):
            return node
        with self.graph.inserting_before(reader):
            kept = emit_call(self.graph, Storing(node, ()), node, backward=True, val=tensor_of(node))
        kept.meta["partitioner_tag"] = "must_be_in_backward"
        self.new[node] = kept
        return kept

    def _is_parameter(self, node: Node) -> bool:
        return node.op == "placeholder" and self.work.joint.describe(node).kind in ("param", "table")

    def _read_new(self, reader: Node) -> None:
        for source in reader.all_input_nodes:
            is_kept = source.op == "placeholder" or source in self.fit.held.saved
            if source not in self.needs.step.behind and not is_kept and self._changed(source):
                reader.replace_input_with(source, self._there(source, reader))

    def _erase(self, casts: Iterable[Node]) -> None:
        for q in casts:
            for x in list(q.users):
                if not x.users:
                    self.graph.erase_node(x)
            if not q.users:
                self.graph.erase_node(q)

    def _tell_sites(self) -> None:
        """Say in each site which way its value goes."""
        hi, repeated = self.work.settings.recipe.hi, {node for node, _ in self.fit.held.repeated}
        for node, row in self.needs.rows.items():
            site = self.work.book.sites[row]
            if node in self.fit.held.saved:
                fmt = self.fit.held.saved[node] or _own(node, hi)
                self.work.book.sites[row] = _on(site, "narrow" if fmt.bits < hi.bits else "keep", fmt.name)
            elif node in repeated:
                self.work.book.sites[row] = _on(site, "recompute", hi.name)


def _on(site: Site, way: Way, fmt: str) -> Site:
    why = "" if way == "narrow" else _WHY[way]
    return replace(site, way=way, format=fmt, reads="backward" if way == "narrow" else site.reads, why=why)


_WHY = {
    "keep": "the peak budget leaves room to keep it",
    "recompute": "the peak budget has it computed again in backward",
}


def _own(node: Node, hi: Format) -> Format:
    return parse("fp32") if tensor_of(node).dtype == torch.float32 else hi
