"""Inductor's loops over booleans in one bit each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch

Split = Callable[[Sequence[int]], tuple[list[int], list[int], list[int]]]


def packs_in_loops(pack: object, unpack: object, split: Split) -> None:
    """Make Inductor compute ``pack(x)`` and ``unpack(q, shape)`` in loops, which fuse with those around them.

    ``split`` of a shape returns the sizes before the dimension that is split, its eight slices, and the sizes behind.
    Bit j holds slice j. A loop that packs computes what makes the booleans eight times, once for each slice. The bits
    are added as float32, which is exact and which CPUs convert faster than they shift bytes.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import ops

    def packed(x: ir.TensorBox) -> ir.TensorBox:
        before, slices, behind = split([int(size) for size in x.get_size()])
        x.mark_reuse(slices[0])
        load = lowering.view(x, [*before, *slices, *behind]).make_loader()
        at = len(before)

        def byte(index: Sequence[sympy.Expr]) -> object:
            bits = (load([*index[:at], j, *index[at:]]) for j in range(slices[0]))
            parts = [ops.to_dtype(bit, torch.float32, src_dtype=torch.bool) for bit in bits]
            total = parts[0]
            for j, part in enumerate(parts[1:], 1):
                total = ops.add(total, ops.mul(part, ops.constant(float(1 << j), torch.float32)))
            return ops.to_dtype(total, torch.uint8, src_dtype=torch.float32)

        ranges = [*before, slices[1], *behind]
        return ir.Pointwise.create(device=x.get_device(), dtype=torch.uint8, inner_fn=byte, ranges=ranges)

    def unpacked(q: ir.TensorBox, shape: Sequence[sympy.Expr]) -> ir.TensorBox:
        before, slices, behind = split([int(size) for size in shape])
        load, at = q.make_loader(), len(before)

        def boolean(index: Sequence[sympy.Expr]) -> object:
            byte = ops.to_dtype(load([*index[:at], *index[at + 1 :]]), torch.int32, src_dtype=torch.uint8)
            bit = ops.bitwise_left_shift(ops.constant(1, torch.int32), ops.index_expr(index[at], torch.int32))
            return ops.ne(ops.bitwise_and(byte, bit), ops.constant(0, torch.int32))

        ranges = [*before, *slices, *behind]
        whole = ir.Pointwise.create(device=q.get_device(), dtype=torch.bool, inner_fn=boolean, ranges=ranges)
        return lowering.view(whole, [*shape])

    for op, loop in ((pack, packed), (unpack, unpacked)):
        if op not in lowering.lowerings:
            lowering.register_lowering(op, type_promotion_kind=None)(loop)
