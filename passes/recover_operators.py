"""Recover the operators that the model called from the decomposed joint graph."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.passes.analysis import regions
from fxprec.passes.analysis.operators import recover_operators
from fxprec.passes.analysis.values import mark_values
from fxprec.passes.base import Pass, Work


@dataclass(frozen=True)
class RecoverOperators(Pass):
    """Fill ``work.operators``, and mark values that no later pass may touch; a peak budget replaces checkpoints."""

    name: str = "recover-operators"
    rounds_log_softmax: bool = False
    """True: round log-softmax's result, as the papers do. False: leave the result in its dtype."""

    def apply(self, work: Work) -> None:
        mark_values(work.joint.graph, stored=not self.rounds_log_softmax)
        if work.fits_peak and regions.forget(work.joint.graph):
            work.remarks.append("peak budget: replaces the model's own checkpointing")
        work.operators = recover_operators(work.joint)
