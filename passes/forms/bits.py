"""Keep booleans in one bit each: masks of dropout, and comparisons that backward reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.ir.symbolic import PackBits, UnpackBits
from fxprec.numerics.bits import BIT, Bit, folded
from fxprec.passes.analysis.joint import is_dense, memory_order, tensor_of
from fxprec.passes.analysis.ways import ANY, Form
from fxprec.passes.forms.stage import Stage
from fxprec.passes.sites import emit, emit_call, insertion_point_after
from fxprec.plan.rows import Site

aten = torch.ops.aten
_FEW = 1024  # elements; fewer stay booleans, since packing costs more than it saves


@dataclass(frozen=True)
class Bits(Form):
    """The booleans themselves, packed."""

    format: Bit = BIT

    serves = ANY
    counted = "in bits"
    options = frozenset()

    @staticmethod
    def can_hold(val: torch.Tensor) -> bool:
        """Return whether a tensor is a mask that can be packed: dense, of static shape, and not short."""
        is_static = all(isinstance(size, int) for size in (*val.shape, *val.stride()))
        if val.dtype is not torch.bool or not is_static or val.numel() < _FEW:
            return False
        return is_dense(val) and folded([val.shape[d] for d in memory_order(val)]) is not None

    def store(self, value: Node, stage: Stage) -> None:
        graph, val = stage.graph, tensor_of(value)
        order = memory_order(val)
        back, is_in_order = [order.index(d) for d in range(val.ndim)], order == sorted(order)
        with graph.inserting_before(insertion_point_after(value).next):
            ordered = value if is_in_order else emit(graph, aten.permute.default, (value, order), value)
            q = emit_call(graph, PackBits(ordered), value)
            read = emit_call(graph, UnpackBits(q, [val.shape[d] for d in order]), value)
            read = read if is_in_order else emit(graph, aten.permute.default, (read, back), value)
        for reader in [user for user in value.users if user not in (ordered, q)]:  # forward's too: see `Replay`
            reader.replace_input_with(value, read)
        stage.decoded[value] = read

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        return site  # only numbers have rows in the plan

    def matches_row(self, site: Site) -> bool:
        return False
