"""Rules, and tensors with every special value, for the tests of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fxprec.numerics.formats import parse
from fxprec.runtime.optim.rule import Rule
from fxprec.runtime.optim.states import num_blocks

_SPECIAL = (0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -3e-39, 3.3e38, 65519.9, 65520.0, 1.0)


def rule(algorithm: str, update: str, fmt: str, carrier: torch.dtype, **options: object) -> Rule:
    """A rule with every option that adds operations, unless ``options`` says otherwise."""
    every: dict[str, object] = {"weight_decay": True, "statistics": True}
    every |= {"sgd": {"momentum": True, "nesterov": True}, "adamw": {"amsgrad": True}}.get(algorithm, {})
    return Rule(algorithm, update, parse(fmt), carrier, **(every | options))  # type: ignore[arg-type]


RULES = [
    rule("sgd", "nearest", "fp32", torch.float32, maximize=True),
    rule("sgd", "stochastic", "bf16", torch.bfloat16),
    rule("sgd", "stochastic+kahan", "fp16", torch.float16),
    rule("sgd", "kahan", "1-8-3:ieee", torch.bfloat16, momentum=False, nesterov=False),
    rule("adamw", "stochastic", "1-5-2", torch.float32, amsgrad=False),
    rule("adamw", "stochastic+kahan", "bf16", torch.bfloat16, long_lerp=True),
    rule("adamw", "nearest", "fp32", torch.float32, weight_decay=False),
    rule("sgd", "kahan", "bf16", torch.bfloat16, states="float32"),
    rule("sgd", "nearest", "fp32", torch.float32, states="8bit"),
    rule("adamw", "stochastic", "bf16", torch.bfloat16, states="8bit"),
    rule("adamw", "nearest", "fp32", torch.float32, states="bf16"),
    rule("adamw", "kahan", "fp16", torch.float16, states="8bit", amsgrad=False),
    rule("sgd", "kahan", "bf16", torch.bfloat16, states="4bit"),
    rule("adamw", "nearest", "fp32", torch.float32, states="4bit"),
    rule("lion", "nearest", "fp32", torch.float32, maximize=True),
    rule("lion", "stochastic+kahan", "bf16", torch.bfloat16, states="8bit", clipped=True),
    rule("muon direction", "nearest", "fp32", torch.float32, statistics=False, nesterov=True, long_ahead=True),
    rule("muon direction", "nearest", "bf16", torch.bfloat16, statistics=False, states="8bit", clipped=True),
    rule("muon move", "nearest", "fp32", torch.float32),
    rule("muon move", "stochastic+kahan", "bf16", torch.bfloat16),
    rule("sgd", "nearest", "bf16", torch.bfloat16, clipped=True, maximize=True),
    rule("adamw", "stochastic", "bf16", torch.bfloat16, clipped=True, states="bf16"),
]


def row_of(rule: Rule, n: int, seed: int = 0) -> list[Tensor]:
    """Tensors of 16 decades, every special value against ordinary ones in each of them."""
    g = torch.Generator().manual_seed(seed)
    row = []
    for name in rule.tensors:
        if name in rule.coded:
            codes = torch.randint(256, (rule.size_of(name, n),), dtype=torch.uint8, generator=g)
            row.append(codes.view(rule.dtype_of(name)))
            continue
        x = torch.randn(n, generator=g) * 10 ** (torch.rand(n, generator=g) * 16 - 12)
        special = torch.tensor(_SPECIAL)[: n // 4]
        x[torch.randperm(n, generator=g)[: len(special)]] = special
        row.append((x.abs() if "sq" in name else x).to(rule.dtype_of(name)))
    for _ in rule.scales:
        scales = torch.randint(100, 130, (num_blocks(n),), dtype=torch.uint8, generator=g)
        scales[torch.rand(len(scales), generator=g) < 0.1] = 0
        scales[3:4] = 255  # a block that had inf or NaN
        row.append(scales)
    return row


def numbers_of(rule: Rule, rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Scalars as a step has them, and integers, for each of ``rows`` parameters."""
    g = torch.Generator().manual_seed(seed)
    usual = {
        "neg_lr": -0.03, "momentum": 0.9, "undamped": 0.7, "weight_decay": 0.01, "first": 0.0,
        "neg_step_size": -0.02, "decay": 0.999, "neg_lr_decay": -0.001, "beta1": 0.3, "rest1": 0.7, "lerp": 0.3, "lerp_ahead": 0.05,
        "beta2": 0.98, "rest2": 0.02, "root2": 0.4, "eps": 1e-8, "clip": 0.37,
    }  # fmt: skip
    scalars = torch.tensor([[usual[name] for name in rule.scalars]] * rows)
    scalars = scalars * (1 + 0.1 * torch.arange(rows)[:, None])
    return scalars, torch.randint(-(2**31), 2**31 - 1, (rows, 3), dtype=torch.int32, generator=g)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, any NaN equal to any other."""
    if a.dtype in (torch.uint8, torch.int8):
        return torch.equal(a, b)
    dtype = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(dtype) == b.view(dtype)) | (a.isnan() & b.isnan())).all())
