"""The plain reference: the maths of a rule, op by op, on any device; also what Dynamo inlines."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.runtime.optim import maths
from fxprec.runtime.optim.rule import INTEGERS, Rule


def run(rule: Rule, row: list[Tensor], scalars: Tensor, integers: Tensor, counts: Tensor | None) -> None:
    """Step one parameter's tensors (`Rule.tensors`; flat, equal layout) in place.

    ``scalars``: float32 (`Rule.scalars`,); ``integers``: int32 (`INTEGERS`,); ``counts``: int64 (2,).
    """
    tensors = {name: t.float() for name, t in zip(rule.tensors, row, strict=True)}
    given = dict(zip(rule.scalars, scalars.unbind(), strict=True))
    given |= dict(zip(INTEGERS, integers.unbind(), strict=True))
    index = None
    if rule.stochastic:
        index = torch.arange(row[0].numel(), dtype=torch.int32, device=row[0].device)
    found = maths.step(rule, tensors, given, index)
    for name, t in zip(rule.tensors, row, strict=True):
        if name in found.values:
            t.copy_(found.values[name])
    if counts is not None and found.nonzero is not None and found.cancelled is not None:
        counts += torch.stack([found.nonzero.sum(), found.cancelled.sum()])
