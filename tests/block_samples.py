"""Block formats and float32 numbers that the tests of their codec and kernels share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxprec.numerics import blocks
from fxprec.numerics.blocks import E2M1, BlockFormat, Integer
from fxprec.numerics.formats import E4M3FN

FORMATS = [
    *blocks.NAMED.values(),
    BlockFormat(Integer(4), 64, "bf16"),
    BlockFormat(Integer(1), 8, "bf16"),
    BlockFormat(E2M1, 16, "bf16"),
    BlockFormat(E4M3FN, 32, "e8m0up"),
    BlockFormat(E2M1, 16, "e4m3fn"),
]


def ids(fmt: BlockFormat) -> str:
    return fmt.name


def numbers(kind: str, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    match kind:
        case "wide":
            return x * torch.exp2(torch.randint(-140, 120, (count,), generator=generator).float())
        case "bits":
            return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)
        case "sparse":
            return torch.relu(x)
        case "zero":
            return torch.zeros(count)
        case "subnormal":
            return x * 1e-42
        case "mean":
            return x + 1000
        case "huge":
            return x * 3e38
        case "special":
            x[::700], x[40::900] = math.inf, math.nan
    return x


KINDS = ("normal", "wide", "bits", "sparse", "zero", "subnormal", "mean", "huge", "special")
