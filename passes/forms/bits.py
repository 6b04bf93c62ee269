"""Keep booleans in one bit each: masks of dropout, and comparisons that backward reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch.fx import Node

from fxprec.ir.symbolic import PackBits, UnpackBits
from fxprec.numerics.bits import BIT, IN_A_BYTE, Bit, folded
from fxprec.passes.analysis.joint import is_dense, memory_order, tensor_of
from fxprec.passes.analysis.replay.kernels import draws
from fxprec.passes.analysis.ways import ANY, Form
from fxprec.passes.forms.candidate import Candidate
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
    passes = 1.0
    replaces_value = True

    @classmethod
    def offers(cls, value: Candidate) -> Iterator[Self]:
        is_drawn = any(map(draws, value.node.all_input_nodes))
        if not value.is_returned and not value.has_form and cls.can_hold(value.val, is_drawn=is_drawn):
            yield cls()

    @staticmethod
    def can_hold(val: torch.Tensor, *, is_drawn: bool = False) -> bool:
        """Return whether a tensor is a mask that can be packed: dense, of static shape, and not short.

        ``is_drawn``: random numbers are drawn for the mask, in the loop that packs it. On a GPU that loop draws four
        numbers at once, for places that follow each other. So each slice must lie in one piece.
        """
        is_static = all(isinstance(size, int) for size in (*val.shape, *val.stride()))
        if val.dtype is not torch.bool or not is_static or val.numel() < _FEW or not is_dense(val):
            return False
        fold = folded([val.shape[d] for d in memory_order(val)])
        if fold is None:
            return False
        is_in_pieces = fold[0] == 0 and val.is_contiguous() and val.numel() % (4 * IN_A_BYTE) == 0
        return is_in_pieces or not (is_drawn and val.is_cuda)

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
