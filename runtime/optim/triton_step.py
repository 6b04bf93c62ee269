"""Launch of the generated Triton kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fxprec.errors import ConfigError
from fxprec.runtime import on_device
from fxprec.runtime.optim.rule import Rule
from fxprec.runtime.optim.triton_source import BLOCK, kernel


def run(rule: Rule, rows: list[list[Tensor]], scalars: Tensor, integers: Tensor, counts: Tensor | None) -> bool:
    """Step every row of tensors in place, as `cpp.run`; always True.

    ``scalars`` and ``integers`` are copied to the device where they are not there. Nothing waits for the device.
    Raises `ConfigError` while a CUDA graph is captured.
    """
    device = rows[0][0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "step() runs in the capture of a CUDA graph, which would keep the addresses of today's gradients; "
            "call it outside of torch.cuda.graph"
        )
    first, facts = 0, []
    for row in rows:
        facts.append((first, row[0].numel(), *(t.data_ptr() for t in row)))
        first += -(-row[0].numel() // BLOCK)
    if not first:
        return True
    inputs = [_table(tuple(facts), device), *(on_device.upload(t, device).contiguous() for t in (scalars, integers))]
    if counts is None:
        counts = torch.zeros(0, dtype=torch.int64, device=device)
    steps = (len(rows) - 1).bit_length()
    with on_device.current(device):
        kernel(rule)[(first,)](*inputs, counts, len(rows), BLOCK=BLOCK, STEPS=steps, enable_fp_fusion=False)
    return True


@lru_cache(maxsize=64)
def _table(facts: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return, for each parameter, its first program, its elements and the addresses of its tensors.

    Gradients that keep their addresses, and so do most of a caching allocator, upload nothing.
    """
    return on_device.upload(torch.tensor(facts, dtype=torch.int64, device="cpu"), device)
