"""What one compiled optimizer step depends on, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from fxprec.numerics.formats import BF16, FP16, FP32, Format

Update: TypeAlias = Literal["nearest", "stochastic", "kahan", "stochastic+kahan"]
UPDATES: tuple[Update, ...] = ("nearest", "stochastic", "kahan", "stochastic+kahan")

CARRIERS: dict[torch.dtype, Format] = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
"""Dtypes that weights and state may be stored in, and the format each is."""


@dataclass(frozen=True)
class Rule:
    """One way to step one kind of tensor: what changes the code, and nothing that is a number at run time."""

    algorithm: Literal["sgd", "adamw"]
    update: Update
    format: Format
    """What weights, state and updates are rounded to."""
    carrier: torch.dtype
    """Dtype of weights, gradients and state."""
    momentum: bool = False
    nesterov: bool = False
    weight_decay: bool = False
    maximize: bool = False
    amsgrad: bool = False
    long_lerp: bool = False
    """AdamW with 1 - beta1 >= 0.5, where torch's ``lerp`` starts from the other end."""
    statistics: bool = False

    @property
    def stochastic(self) -> bool:
        """Whether the new weight is rounded stochastically."""
        return self.update.startswith("stochastic")

    @property
    def kahan(self) -> bool:
        """Whether a compensation is carried."""
        return self.update.endswith("kahan")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the state tensors of the parameter's shape, torch.optim's where it has them."""
        if self.algorithm == "sgd":
            names: tuple[str, ...] = ("momentum_buffer",) if self.momentum else ()
        else:
            names = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if self.amsgrad else ())
        return (*names, "compensation") if self.kahan else names

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors read, in the kernels' order; all but ``grad`` are written."""
        return ("param", "grad", *self.state)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the float32 numbers given with each parameter at each step."""
        if self.algorithm == "sgd":
            return ("neg_lr", "momentum", "undamped", "weight_decay", "first")
        return ("neg_step_size", "decay", "neg_lr_decay", "beta1", "rest1", "beta2", "rest2", "root2", "eps")


INTEGERS = ("key0", "key1", "step")
"""Names of the int32 numbers given with each parameter: its key, and the step that the random bits change with."""
