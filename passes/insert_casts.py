"""Insert a cast for each tensor that is stored in a chosen format. The storage decides which tensors are."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.config.grad_scaling import GradScaling
from fxprec.passes.analysis import gemm_costs, sensitive
from fxprec.passes.analysis.unplanned_values import notices_of_unplanned
from fxprec.passes.base import Pass, Work
from fxprec.passes.casts.in_layout import cast_as_multiplied
from fxprec.passes.casts.simulated import insert_simulated_casts
from fxprec.passes.casts.stored import insert_stored_casts
from fxprec.passes.sites import SiteBook


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Insert ``quantize``/``dequantize`` for every tensor that is stored in a chosen format."""

    name: str = "insert-casts"
    everywhere: bool = False
    """True: round every counted tensor for every reader, as the papers do. False: cast a tensor where it is written to
    memory, and keep tensors that 8 bits would spoil in higher precision."""

    def apply(self, work: Work) -> None:
        on_gpu = gemm_costs.gpu_of(work.joint.device) is not None
        work.book = SiteBook(
            graph=work.joint.graph,
            table=work.joint.table,
            recipe=work.settings.recipe,
            storage=work.settings.storage,
            low=work.assignment.low,
            given=None if work.given is None else work.given.sites,
            reasons_high={} if self.everywhere else sensitive.reasons_high(work.grouped),
            guards_gradients=isinstance(work.settings.grad_scaling, GradScaling),
            multiplies_codes=on_gpu and not self.everywhere,
        )
        insert = insert_simulated_casts if self.everywhere else insert_stored_casts
        insert(work.grouped, work.book)
        if work.book.multiplies_codes:
            cast_as_multiplied(work)
        work.notices += notices_of_unplanned(work, rounds_gradients=self.everywhere)
