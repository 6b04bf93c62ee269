"""Store tensors that may have errors of mean 0 in a block format of few bits, such as operands of weights' gradients.

A copy that is rounded at random keeps the mean of gradients (`unbiased`). A ReLU's backward asks whether its result is
above 0; the answer is a mask of one bit beside the copy. Other tensors that backward reads stay in the recipe's 8 bits.
Attention's queries and keys take 8 bits in small blocks. Definitions: docs/compute.md, "Fewer than 8 bits".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from fxprec.ir.symbolic import Quantize
from fxprec.numerics.blocks import BlockFormat, find_blocks
from fxprec.passes.analysis.joint import is_backward
from fxprec.passes.base import Work
from fxprec.passes.casts.blocks import SIGNS, WHOLE_BITS, draw_seed, store_in_blocks
from fxprec.passes.casts.in_blocks import Refusals
from fxprec.passes.notice import Notice
from fxprec.plan import Site


@dataclass(frozen=True)
class StoreBlocks:
    """Turn casts whose errors average out into casts to the recipe's ``saved`` format."""

    name: str = "store-blocks"

    def apply(self, work: Work) -> None:
        if work.fits_peak:  # a peak budget takes block formats where they are of use
            return
        graph, chosen = work.joint.graph, _chosen(work)
        coarse = [q for _, q, fmt in chosen if fmt.bits < WHOLE_BITS]
        seed = draw_seed(graph, min(coarse)) if coarse else None  # sites are not always in the graph's order
        for site, q, fmt in chosen:
            has_readers = store_in_blocks(graph, q, fmt, seed if fmt.bits < WHOLE_BITS else None)
            work.book.sites[site.id] = replace(site, saved_as=(fmt if has_readers else SIGNS).name)


def _chosen(work: Work) -> list[tuple[Site, Node, BlockFormat]]:
    """Return the casts to turn, in the order of the sites, before any is: who reads what is asked of all together."""
    casts = {cast.row: q for q, cast in Quantize.among(Quantize.nodes(work.joint.graph)) if not is_backward(q)}
    refusals, found = Refusals(work), []
    for site in list(work.book.sites):
        q = casts.get(site.id)
        fmt = _wanted(work, site, q, refusals)
        reason = None if fmt is None else refusals.of(site, q, fmt)
        if fmt is None or q is None or reason is not None:
            _tell(work, site, fmt, reason)
        else:
            found.append((site, q, fmt))
    return found


def _wanted(work: Work, site: Site, q: Node | None, refusals: Refusals) -> BlockFormat | None:
    """Return the format a site is to be saved in: the given plan's, else the recipe's."""
    if work.given is None:
        saved = work.settings.recipe.saved
        return None if saved is None else refusals.instead(q, saved)
    name = work.given.sites[site.id].saved_as
    return find_blocks(name) if name else None


def _tell(work: Work, site: Site, fmt: BlockFormat | None, reason: str | None) -> None:
    """Say why a low tensor is in 8 bits; where the given plan wants it in blocks, as a notice."""
    if fmt is None or reason is None:
        return
    if reason and not site.why:
        work.book.sites[site.id] = replace(site, why=f"{fmt.name} is no choice: {reason}")
    if work.given is not None:
        why = (
            reason or f"no copy in 8 bits is saved of it for backward alone{f', since {site.why}' if site.why else ''}"
        )
        detail = f"sites[{site.id}].saved_as of the given plan is {fmt.name!r}, and it stays in {site.format}: {why}"
        work.notices.append(Notice(f"{site.tensor} ({site.module})" if site.module else site.tensor, detail))
