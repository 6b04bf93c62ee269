"""Shorten the lifetimes of large tensors, before it is chosen which tensors to keep.

A convolution's two gradients are computed one after the other. The gradient of an upsampling becomes a sum of slices.
Sums of 16-bit gradients wait in 16 bits. Under a peak budget parts of a concatenation get buffers of their own; each
costs a copy, 4 % of a transformer's step.
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
    """Rewrite gradients of convolutions and upsamplings, sums of gradients and, under a peak budget, concatenations."""

    name: str = "shorten-lives"

    def apply(self, work: Work) -> None:
        if not work.joint.tangents:
            return
        if work.fits_peak:
            give_own_buffers(work)
        split_gradients(work.joint.graph)
        sum_upsampled(work.joint.graph)
        narrow_sums(work)
