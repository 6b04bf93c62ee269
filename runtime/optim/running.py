"""Step rows of tensors by the generated kernel, or op by op if there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxprec.runtime.optim import cpp, reference
from fxprec.runtime.optim.local import dense_row, in_shape_of, is_dense, local
from fxprec.runtime.optim.rule import Rule


def run(
    rule: Rule,
    group: Mapping[str, Any],
    rows: list[list[Tensor]],
    floats: Tensor,
    integers: Tensor,
    counts: list[Tensor],
) -> None:
    """Step rows of tensors (`Rule.tensors`, then `Rule.scales`) in place; op by op if the group has ``foreach=False``.

    ``floats``: float32 (rows, `Rule.scalars`); ``integers``: int32 (rows, `INTEGERS`); ``counts``: an int64 (2,) for
    each row, which is added to, or an empty list.
    """
    step = _reference if group.get("foreach") is False else _kernel
    step(rule, rows, floats, integers, counts)


def _reference(rule: Rule, rows: list[list[Tensor]], floats: Tensor, integers: Tensor, counts: list[Tensor]) -> None:
    for i, row in enumerate(rows):
        copies = dense_row(rule, row)
        device = copies[0].device
        reference.run(rule, copies, floats[i].to(device), integers[i].to(device), counts[i] if counts else None)
        _write_back(row, copies)


def _kernel(rule: Rule, rows: list[list[Tensor]], floats: Tensor, integers: Tensor, counts: list[Tensor]) -> None:
    dense = [row if is_dense(rule, row) else dense_row(rule, row) for row in rows]
    device = dense[0][0].device
    found = torch.zeros(len(rows), 2, dtype=torch.int64, device=device) if counts else None
    if device.type != "cpu":
        from fxprec.runtime.optim import triton_step

        triton_step.run(rule, dense, floats, integers, found)
    elif not cpp.run(rule, dense, floats, integers, found):
        _reference(rule, rows, floats, integers, counts)
        return
    for row, copies in zip(rows, dense, strict=True):
        if copies is not row:
            _write_back(row, copies)
    # Autograd does not see what kernels write.
    torch.autograd.graph.increment_version([row[0] for row in rows])
    if found is not None:
        torch._foreach_add_(counts, list(found.unbind()))


def _write_back(row: list[Tensor], copies: list[Tensor]) -> None:
    """Copy stepped copies back into their tensors; the gradient, at 1, was not written."""
    param = local(row[0])
    for i, (t, copy) in enumerate(zip(row, copies, strict=True)):
        here = local(t)
        if i != 1 and copy.data_ptr() != here.data_ptr():
            here.copy_(in_shape_of(copy, param))
