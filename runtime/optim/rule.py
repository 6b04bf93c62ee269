"""Describe as data everything that one compiled optimizer step depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from fxprec.numerics.formats import BF16, FP16, FP32, Format
from fxprec.runtime.optim.states import Codes, codes_of, num_blocks, num_bytes

Algorithm: TypeAlias = Literal["sgd", "adamw", "lion", "muon", "muon direction", "muon move"]
"""Algorithms of rules. Muon has the state; its "direction" and "move" are two kernels, before and after a matrix is
orthogonalised."""
Update: TypeAlias = Literal["nearest", "stochastic", "kahan", "stochastic+kahan"]
UPDATES: tuple[Update, ...] = ("nearest", "stochastic", "kahan", "stochastic+kahan")

States: TypeAlias = Literal["float32", "bf16", "8bit", "4bit"]
STATES: tuple[States, ...] = ("float32", "bf16", "8bit", "4bit")
"""Forms that averages can be kept in, from the exact form to the smallest."""
Gradients: TypeAlias = Literal["bf16"]
"""Formats that gradients can be summed in from backward to ``step()``."""
Norm: TypeAlias = Literal["exact", "last"]
NORMS: tuple[Norm, ...] = ("exact", "last")
"""Steps whose global norm can clip gradients: this step, or the last one."""
LAST = NORMS[1]
AUTO = "auto"
"""Value of ``states`` that leaves the form to a step budget; until a budget chooses, it is the first of `STATES`."""
# Bytes with two codes are int8, so that the dtype shows the form.
_STATE_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8, "4bit": torch.int8}

CARRIERS: dict[torch.dtype, Format] = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
"""Dtypes that weights and state may be stored in, with the format of each."""


@dataclass(frozen=True)
class Rule:
    """How one kind of tensor is stepped: everything that changes a kernel's code, but no number of run time."""

    algorithm: Algorithm
    update: Update
    format: Format
    """Format that weights, state and updates are rounded to."""
    carrier: torch.dtype
    """Dtype of weights and state."""
    gradient: torch.dtype | None = None
    """Dtype of gradients; None: ``carrier``."""
    momentum: bool = False
    nesterov: bool = False
    weight_decay: bool = False
    maximize: bool = False
    amsgrad: bool = False
    long_lerp: bool = False
    """Whether 1 - beta1 of AdamW or 1 - momentum of Muon is 0.5 or more: torch's ``lerp`` then starts from the end."""
    long_ahead: bool = False
    """The same for Muon's Nesterov momentum, if momentum >= 0.5."""
    clipped: bool = False
    """Whether the gradient is multiplied by a factor first."""
    statistics: bool = False
    states: States | None = None
    """Form of averages; None: ``carrier``, rounded to ``format``, as weights are."""

    @property
    def stochastic(self) -> bool:
        """Return whether the new weight is rounded stochastically."""
        return self.update.startswith("stochastic")

    @property
    def kahan(self) -> bool:
        """Return whether a compensation of each weight is kept."""
        return self.update.endswith("kahan")

    @property
    def random(self) -> bool:
        """Return whether anything is rounded by random bits."""
        return self.stochastic or (self.states in ("bf16", "8bit", "4bit") and bool(self.averages))

    @property
    def working(self) -> Format:
        """Return the format that each operation on gradient and averages is rounded to."""
        return self.format if self.states is None else FP32

    @property
    def averages(self) -> tuple[str, ...]:
        """Return the names of torch.optim's own state tensors of the parameter's shape."""
        if self.algorithm == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        if self.algorithm == "lion":
            return ("exp_avg",)
        if self.algorithm != "adamw":
            return () if self.algorithm == "muon move" else ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if self.amsgrad else ())

    @property
    def state(self) -> tuple[str, ...]:
        """Return the names of the state tensors of the parameter's shape."""
        return (*self.averages, "compensation") if self.kahan else self.averages

    @property
    def coded(self) -> tuple[str, ...]:
        """Return the names of the state tensors that are stored as codes, in blocks with a scale each."""
        return self.averages if self.states in ("8bit", "4bit") else ()

    def codes(self, name: str) -> Codes:
        """Return the codes of one of `coded`."""
        assert self.states is not None
        return codes_of(self.states, name)

    @property
    def packed(self) -> tuple[str, ...]:
        """Return the names of the state tensors with two codes in a byte; they are flat, as scales are."""
        return self.coded if self.states == "4bit" else ()

    @property
    def scales(self) -> tuple[str, ...]:
        """Return the names of the state tensors with the scales of `coded`."""
        return tuple(map(scale_name, self.coded))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that one of `tensors` is stored in."""
        if name == _ORTHOGONALISED.get(self.algorithm):
            return torch.bfloat16
        if name == "grad" and self.gradient is not None:
            return self.gradient
        return _STATE_DTYPES[self.states] if self.states is not None and name in self.averages else self.carrier

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of the state tensors of a parameter, scales included; step counts are left out."""
        scales = len(self.scales) * num_blocks(elements)
        return scales + sum(self.size_of(name, elements) * self.dtype_of(name).itemsize for name in self.state)

    def size_of(self, name: str, elements: int) -> int:
        """Return the number of stored elements of one of `tensors`, for a parameter of ``elements``."""
        return num_bytes(self.codes(name), elements) if name in self.coded else elements

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of all tensors that are read, in the kernels' order; all but ``grad`` are written."""
        return ("param", "grad", *self.state)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Return the names of the float32 numbers given with each parameter at each step."""
        return _SCALARS[self.algorithm] + (("clip",) if self.clipped else ())


_SCALARS = {
    "sgd": ("neg_lr", "momentum", "undamped", "weight_decay", "first"),
    "adamw": ("neg_step_size", "decay", "neg_lr_decay", "lerp", "beta2", "rest2", "root2", "eps"),
    "lion": ("neg_lr", "decay", "neg_lr_decay", "beta1", "rest1", "beta2", "rest2"),
    "muon direction": ("lerp", "lerp_ahead"),
    "muon move": ("neg_lr", "decay", "neg_lr_decay"),
}
_ORTHOGONALISED = {"muon direction": "param", "muon move": "grad"}  # bfloat16: the matrix before and after


def scale_name(name: str) -> str:
    """Return the state key of a state tensor's scales."""
    return f"{name}_scale"


INTEGERS = ("key0", "key1", "step")
"""Names of the int32 numbers given with each parameter: its key, and the step, with which random bits change."""
