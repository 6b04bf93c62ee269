"""Give each copy of a forward tensor in 8 bits or fewer a power-of-two scale of its own.

e4m3fn's normal numbers begin at 2^-6. Without a scale, the gradient of a weight that multiplies activations of rms
0.006 would be off by 10 %. Smaller activations would be stored as 0. The cast multiplies by the scale, and each reader
of the codes, a decode or a GEMM, divides by it. The runtime chooses the exponent from its statistics
(`fxprec.runtime.scaling.copies`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from torch.fx import Node

from fxprec.ir.symbolic import AS_STORED, CodedGemm, Dequantize, Quantize, is_in_blocks
from fxprec.numerics.formats import parse
from fxprec.passes.analysis.code_readers import code_readers
from fxprec.passes.base import Pass, Work
from fxprec.plan.scales import Copy, ScaleGraph, Slot


@dataclass(frozen=True)
class ScaleCopies(Pass):
    """Record in ``work.scales`` the copies that have a scale, and make their readers take the scale off."""

    name: str = "scale-copies"

    def apply(self, work: Work) -> None:
        scales = work.scales or ScaleGraph()
        slots = _Slots(scales, len(work.book.sites))
        copies = []
        for row, found in sorted(_casts(work).items()):
            readers = [code_readers(q) for q in found]
            if all(r is not None for r in readers):
                copies.append(Copy(row, Quantize.of(found[0]).format))
                for node, positions in ((n, p) for r in readers if r is not None for n, p in r.items()):
                    _take_off(node, positions, row, slots)
        if copies:
            work.scales = replace(scales, slots=slots.all, copies=tuple(copies))


def _casts(work: Work) -> dict[int, list[Node]]:
    """Return the casts of forward tensors that may have a scale, by row."""
    found = defaultdict[int, list[Node]](list)
    site_of = {} if work.scales is None else work.scales.site_of
    for q, cast in Quantize.among(Quantize.nodes(work.joint.graph)):
        if not is_in_blocks(q) and work.book.sites[site_of.get(cast.row, cast.row)].direction == "forward":
            found[cast.row].append(q)
    narrow = {row: qs for row, qs in found.items() if all(_needs_scale(Quantize.of(q).format) for q in qs)}
    return {row: qs for row, qs in narrow.items() if row not in work.unscaled}


def _needs_scale(fmt: str) -> bool:
    """Return whether a copy in this format is scaled: in 16 bits a scale would cost a pass over memory for little."""
    form = parse(fmt)
    return form.bits <= 8 and not form.has_float32_range


class _Slots:
    """Hands out rows of the table whose scale includes that of a copy."""

    def __init__(self, scales: ScaleGraph, sites: int) -> None:
        self._slots = {slot.row: slot for slot in scales.slots}
        self._made: dict[tuple[int, int], int] = {}
        self._next = scales.num_rows(sites)

    @property
    def all(self) -> tuple[Slot, ...]:
        return tuple(self._slots.values())

    def with_copy(self, row: int, copy: int) -> int:
        """Return the row whose exponent is the exponent of ``row`` plus the copy's."""
        if row == AS_STORED:
            return copy
        if (row, copy) not in self._made:
            self._made[row, copy] = self._next
            self._slots[self._next] = replace(self._slots[row], row=self._next, plus_copy=copy)
            self._next += 1
        return self._made[row, copy]


def _take_off(node: Node, positions: list[int], copy: int, slots: _Slots) -> None:
    """Make a decode or a GEMM take off a copy's scale, in addition to the scales that it takes off already."""
    gemm = CodedGemm.match(node)
    if gemm is None:
        read = Dequantize.of(node)
        node.args = replace(read, row=slots.with_copy(read.row, copy)).args
        return
    rows = [gemm.row_a, gemm.row_b]
    for i in positions:
        rows[i] = slots.with_copy(rows[i], copy)
    node.args = replace(gemm, row_a=rows[0], row_b=rows[1]).args
