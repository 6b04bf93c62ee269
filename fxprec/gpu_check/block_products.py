"""Products of operands in blocks by torch: of matrices, and of groups of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.gpu_check.ground import Ground, within
from fxprec.numerics import block_codec
from fxprec.numerics.blocks import find_blocks
from fxprec.numerics.swizzle import swizzled
from fxprec.passes.lowering.block_operands import laid_out
from fxprec.runtime.grouped_mm import grouped_mm
from fxprec.runtime.scaled_mm import scaled_grouped_mm, scaled_mm, swizzled_groups

FORMATS = ("mxfp8", "nvfp4")
OLDEST = 100
SUM = 2.0**-13  # error of a sum of 8-bit products in tensor cores, relative to the sum of magnitudes
ENDS = (96, 96, 320, 480)  # an empty group, one of more than a tile's rows, and tokens that belong to no group


def check(ground: Ground) -> None:
    """Compare with the decoded operands' products in float64. A CPU compares the operators' definitions."""
    if ground.on_gpu and ground.architecture < OLDEST:
        ground.leave_out("scaled_mm", f"sm_{ground.architecture} multiplies no operands in blocks")
        return
    for name in FORMATS:
        with ground.case(f"scaled_mm {name}"):
            a, b = _Operand(ground, name, 300, 256), _Operand(ground, name, 176, 256)
            found = scaled_mm(a.codes, b.codes, a.tiles(), b.tiles(), a.whole, b.whole, None, name, torch.bfloat16)
            _compare(found, a.numbers @ b.numbers.t(), a.numbers.abs() @ b.numbers.abs().t())
        with ground.case(f"scaled_grouped_mm {name}, tokens by matrices"):
            a, b = _Operand(ground, name, 512, 256), _Operand(ground, name, len(ENDS), 176, 256)
            _check_groups(a, b, 0, name)
        with ground.case(f"scaled_grouped_mm {name}, sums over tokens"):
            a, b = _Operand(ground, name, 144, 512), _Operand(ground, name, 176, 512)
            _check_groups(a, b, find_blocks(name).block, name)


class _Operand:
    """Random numbers, as codes along the last dimension."""

    def __init__(self, ground: Ground, name: str, *shape: int) -> None:
        fmt, x = find_blocks(name), torch.randn(shape)
        whole = block_codec.tensor_scale(x, fmt) if fmt.tensor_scale else None
        encoded = block_codec.encode(x, fmt, whole)
        codes, scales = laid_out(encoded, name, shape, is_swizzled=False)
        self.numbers = block_codec.decode(encoded, fmt, x.numel(), whole).view(shape).double()
        self.codes, self.scales = codes.to(ground.device), scales.to(ground.device)
        self.whole = None if whole is None else whole.to(ground.device)

    def tiles(self, groups: tuple[Tensor, int] | None = None) -> Tensor:
        """Return the scales in tiles, those of each group apart; groups are their ends and the tokens of a block."""
        return swizzled(self.scales) if groups is None else swizzled_groups(self.scales, *groups)


def _check_groups(a: _Operand, b: _Operand, block: int, name: str) -> None:
    """Multiply in groups; ``block`` is 0 for tokens by matrices, else the tokens of a block."""
    ends = torch.tensor(ENDS)
    groups = ends.to(a.codes.device), block
    scales = a.tiles(groups), b.tiles(groups if block else None)
    found = scaled_grouped_mm(a.codes, b.codes, *scales, a.whole, b.whole, groups[0], name)
    x, y = a.numbers, b.numbers.mT
    _compare(found, grouped_mm(x, y, ends), grouped_mm(x.abs(), y.abs(), ends))


def _compare(found: Tensor, wanted: Tensor, size: Tensor) -> None:
    """Raise if an element is further off than sums of such magnitudes and one rounding to bfloat16 are."""
    bound = SUM * size + wanted.abs() * torch.finfo(torch.bfloat16).eps
    off = (found.cpu().double() - wanted).abs()
    within("error over its bound", float(torch.where(off > 0, off / bound, 0).nan_to_num(torch.inf).max()), 1.0)
