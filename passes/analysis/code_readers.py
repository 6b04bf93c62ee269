"""Find the readers of a stored copy's codes."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.ir.symbolic import CodedGemm, Dequantize, Transposed
from fxprec.kernels.host import Offload, Reload, WaitOffload, WaitReload
from fxprec.passes.analysis.joint import is_view

_MOVING = frozenset({Transposed.target, Offload.target, WaitOffload.target, Reload.target, WaitReload.target})
_BITS = torch.ops.aten.view.dtype


def code_readers(q: Node) -> dict[Node, list[int]] | None:
    """Return the readers of the codes of ``q``, seen through views, transposed copies and moves to the host.

    Readers are decodes, with an empty list, and GEMMs over codes, with the positions (0, 1) of the operands that are
    these codes. None if any other node reads the codes.
    """
    found: dict[Node, list[int]] = {}
    waiting = [q]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            gemm = CodedGemm.match(user)
            if gemm is not None:
                found.setdefault(user, []).extend(i for i, x in enumerate((gemm.a, gemm.b)) if x is node)
            elif Dequantize.match(user) is not None:
                found[user] = []
            elif user.target in _MOVING or user.target is _BITS or is_view(user):
                waiting.append(user)
            else:
                return None
    return found
