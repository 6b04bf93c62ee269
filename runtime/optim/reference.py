"""Run the maths of a rule op by op on any device: the plain reference, which Dynamo also inlines."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.runtime.optim import maths, states
from fxprec.runtime.optim.rule import INTEGERS, Rule, scale_name


def run(rule: Rule, row: list[Tensor], scalars: Tensor, integers: Tensor, counts: Tensor | None) -> None:
    """Step one parameter's tensors in place: `Rule.tensors`, flat and in one order, then `Rule.scales`.

    ``scalars``: float32 (`Rule.scalars`,); ``integers``: int32 (`INTEGERS`,); ``counts``: int64 (2,).
    """
    held = dict(zip((*rule.tensors, *rule.scales), row, strict=True))
    size = row[0].numel()
    tensors = {
        name: states.decode(rule.codes(name), held[name], held[scale_name(name)], size)
        if name in rule.coded
        else held[name].float()
        for name in rule.tensors
    }
    given = dict(zip(rule.scalars, scalars.unbind(), strict=True))
    given |= dict(zip(INTEGERS, integers.unbind(), strict=True))
    index = torch.arange(size, dtype=torch.int32, device=row[0].device) if rule.random else None
    found = maths.step(rule, tensors, given, index)
    for name, value in found.values.items():
        if name in rule.coded:
            assert index is not None
            codes, scales = states.encode(rule.codes(name), value, states.bits(name, index, given))
            held[name].view(torch.uint8).copy_(codes)
            held[scale_name(name)].copy_(scales)
        else:
            held[name].copy_(value)
    if counts is not None and found.nonzero is not None and found.cancelled is not None:
        counts += torch.stack([found.nonzero.sum(), found.cancelled.sum()])
