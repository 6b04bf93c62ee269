"""Save or compute again what backward needs, in the least time, by the chooser of peak budgets without a bound.

It is to take the place of torch's min-cut where nobody bounds memory; until plans, steps and gradients of all
architectures agree it stands in no pipeline that is run by default (`pipeline.CHOSEN`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxprec.ir.symbolic_blocks import QuantizeBlocks
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.peak.choice import Chooser
from fxprec.passes.analysis.peak.costs import Rates
from fxprec.passes.analysis.peak.needs import needs_of
from fxprec.passes.analysis.peak.problem import Problem
from fxprec.passes.base import Work
from fxprec.passes.casts.ways import Rewrite


@dataclass(frozen=True)
class ChooseCrossings:
    """Choose for each value that backward needs; what is read low alone is stored low."""

    name: str = "choose-crossings"

    def apply(self, work: Work) -> None:
        if not _may_choose(work):
            return
        needs = needs_of(work)
        for node in needs.low.keys() - needs.exactly:
            needs.high.pop(node, None)
        rates = Rates.of(work.joint.table.meta["val"].device)
        # A byte is worth one pass over it: else what is read low alone would be kept wide within another value.
        problem = Problem(replace(needs, few={}), rates, ("narrow",), price=1 / rates.bytes_per_s)
        fit = Chooser(problem).unlimited
        Rewrite(work, needs, fit).rewrite()
        work.is_cut = True
        kept = len(fit.held.saved)
        work.remarks.append(f"crossings: {kept} values are kept, {len(fit.held.repeated)} computed again in backward")


def _may_choose(work: Work) -> bool:
    """Say whether nobody else decides: no budget, no checkpoint, no copies in blocks."""
    graph = work.joint.graph
    is_free = bool(work.joint.tangents) and not work.fits_peak and work.memory_budget == 1
    return is_free and not regions.are_in(graph) and not any(QuantizeBlocks.nodes(graph))
