"""Shorten the lifetimes of large tensors, before a peak budget chooses which tensors to keep.

Parts of a concatenation get buffers of their own. A convolution's two gradients are computed one after the other. The
gradient of an upsampling becomes a sum of slices. Sums of 16-bit gradients wait in 16 bits. Each of these costs a copy
or a second kernel, so the pass does nothing without a peak budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.passes.base import Pass, Work
from fxprec.passes.casts.narrow_sums import narrow_sums
from fxprec.passes.casts.own_buffers import give_own_buffers
from fxprec.passes.casts.two_gradients import split_gradients
from fxprec.passes.casts.upsampled import sum_upsampled


@dataclass(frozen=True)
class ShortenLives(Pass):
    """Rewrite concatenations, gradients of convolutions and upsamplings, and sums of gradients under a peak budget."""

    name: str = "shorten-lives"

    def apply(self, work: Work) -> None:
        if not work.fits_peak:
            return
        give_own_buffers(work)
        split_gradients(work.joint.graph)
        sum_upsampled(work.joint.graph)
        narrow_sums(work)
