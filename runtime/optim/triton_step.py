"""Launch of the generated Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.runtime import on_device
from fxprec.runtime.optim.rule import Rule
from fxprec.runtime.optim.triton_source import BLOCK, kernel


def run(rule: Rule, rows: list[list[Tensor]], scalars: Tensor, integers: Tensor, counts: Tensor | None) -> bool:
    """Step every row of tensors in place, as `cpp.run`; always True.

    ``scalars`` and ``integers`` are copied to the device where they are not there. Nothing waits for the device.
    """
    device = rows[0][0].device
    starts = [(i, start) for i, row in enumerate(rows) for start in range(0, row[0].numel(), BLOCK)]
    if not starts:
        return True
    table = torch.tensor(
        [[row[0].numel(), *(t.data_ptr() for t in row)] for row in rows], dtype=torch.int64, device="cpu"
    )
    blocks = torch.tensor(starts, dtype=torch.int64, device="cpu")
    inputs = [t.to(device, non_blocking=True).contiguous() for t in (table, blocks, scalars, integers)]
    if counts is None:
        counts = torch.zeros(0, dtype=torch.int64, device=device)
    with on_device.current(device):
        kernel(rule)[(len(starts),)](*inputs, counts, BLOCK=BLOCK, enable_fp_fusion=False)
    return True
