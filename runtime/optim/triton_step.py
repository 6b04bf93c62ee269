"""Launch the generated Triton kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fxprec.runtime import on_device
from fxprec.runtime.optim.rule import Rule
from fxprec.runtime.optim.triton_source import ALIGNMENT, BLOCK, kernel

_Facts = tuple[tuple[int, ...], ...]
"""By parameter: first program, elements, row of the scalars, addresses."""


def run(rule: Rule, rows: list[list[Tensor]], scalars: Tensor, integers: Tensor, counts: Tensor | None) -> None:
    """Step every row of tensors in place, as `cpp.run`.

    ``scalars`` and ``integers`` are copied to the device if they are elsewhere. Nothing waits for the device.
    Raises `ConfigError` while a CUDA graph is captured.
    """
    device = rows[0][0].device
    advice = "which would keep the addresses of today's gradients; call it outside of torch.cuda.graph"
    on_device.refuse_capture(device, "step() runs", advice)
    aligned, others = _parts(rows)
    if not aligned and not others:
        return
    inputs = [on_device.upload(t, device).contiguous() for t in (scalars, integers)]
    if counts is None:
        counts = torch.zeros(0, dtype=torch.int64, device=device)
    with on_device.current(device):
        for facts, is_aligned in ((aligned, True), (others, False)):
            if facts:
                programs, items = facts[-1][0] + _programs(facts[-1][1]), len(facts)
                constants = {"BLOCK": BLOCK, "STEPS": (items - 1).bit_length(), "ALIGNED": is_aligned}
                table = _table(facts, device)
                kernel(rule)[(programs,)](table, *inputs, counts, items, **constants, enable_fp_fusion=False)


def _parts(rows: list[list[Tensor]]) -> tuple[_Facts, _Facts]:
    """Return the tables of parameters that are read 16 bytes at a time, and of all others, without empty parameters.

    Triton reads 16 bytes at a time only if addresses and sizes are known to be multiples of `ALIGNMENT`.
    """
    parts: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
    for i, row in enumerate(rows):
        size, addresses = row[0].numel(), [t.data_ptr() for t in row]
        if size:
            part = parts[any(number % ALIGNMENT for number in (size, *addresses))]
            first = part[-1][0] + _programs(part[-1][1]) if part else 0
            part.append((first, size, i, *addresses))
    return tuple(parts[0]), tuple(parts[1])


def _programs(size: int) -> int:
    return -(-size // BLOCK)


@lru_cache(maxsize=64)
def _table(facts: _Facts, device: torch.device) -> Tensor:
    """Return, for each parameter, its first program, its elements, its row of the scalars, its tensors' addresses.

    The table is cached: while gradients keep their addresses, as most of a caching allocator do, nothing is uploaded.
    """
    return on_device.upload(torch.tensor(facts, dtype=torch.int64, device="cpu"), device)
