"""What one compiled optimizer step depends on, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from fxprec.numerics.formats import BF16, FP16, FP32, Format
from fxprec.runtime.optim.states import Codes, codes_of, num_blocks, num_bytes

Algorithm: TypeAlias = Literal["sgd", "adamw", "lion", "muon", "muon direction", "muon move"]
"""Muon holds the state; its direction and its move are two kernels, between which a matrix is orthogonalised."""
Update: TypeAlias = Literal["nearest", "stochastic", "kahan", "stochastic+kahan"]
UPDATES: tuple[Update, ...] = ("nearest", "stochastic", "kahan", "stochastic+kahan")

States: TypeAlias = Literal["float32", "bf16", "8bit", "4bit"]
STATES: tuple[States, ...] = ("float32", "bf16", "8bit", "4bit")
"""From the exact form to the smallest."""
Gradients: TypeAlias = Literal["bf16"]
"""What gradients may be held in from backward to ``step()``."""
Norm: TypeAlias = Literal["exact", "last"]
NORMS: tuple[Norm, ...] = ("exact", "last")
"""By which step's global norm gradients are clipped: this one's, or the last one's."""
LAST = NORMS[1]
AUTO = "auto"
"""What a param group says that leaves the form to a step budget; until one chooses it is the first of `STATES`."""
# int8 has two codes: so a form is known by its dtype.
_STATE_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8, "4bit": torch.int8}

CARRIERS: dict[torch.dtype, Format] = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
"""Dtypes that weights and state may be stored in, and the format each is."""


@dataclass(frozen=True)
class Rule:
    """One way to step one kind of tensor: what changes the code, and nothing that is a number at run time."""

    algorithm: Algorithm
    update: Update
    format: Format
    """What weights, state and updates are rounded to."""
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
    """AdamW with 1 - beta1, Muon with 1 - momentum >= 0.5, where torch's ``lerp`` starts from the other end."""
    long_ahead: bool = False
    """The same of Muon's Nesterov momentum, where momentum >= 0.5."""
    clipped: bool = False
    """Whether the gradient is multiplied by a factor first."""
    statistics: bool = False
    states: States | None = None
    """How averages are held; None: in ``carrier``, rounded to ``format``, as the weights are."""

    @property
    def stochastic(self) -> bool:
        """Whether the new weight is rounded stochastically."""
        return self.update.startswith("stochastic")

    @property
    def kahan(self) -> bool:
        """Whether a compensation is carried."""
        return self.update.endswith("kahan")

    @property
    def random(self) -> bool:
        """Whether anything is rounded by random bits."""
        return self.stochastic or (self.states in ("bf16", "8bit", "4bit") and bool(self.averages))

    @property
    def working(self) -> Format:
        """Format that each operation on gradient and averages is rounded to."""
        return self.format if self.states is None else FP32

    @property
    def averages(self) -> tuple[str, ...]:
        """Names of torch.optim's own state tensors of the parameter's shape."""
        if self.algorithm == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        if self.algorithm == "lion":
            return ("exp_avg",)
        if self.algorithm != "adamw":
            return () if self.algorithm == "muon move" else ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if self.amsgrad else ())

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the state tensors of the parameter's shape."""
        return (*self.averages, "compensation") if self.kahan else self.averages

    @property
    def coded(self) -> tuple[str, ...]:
        """Names of the state tensors that are held as codes, in blocks with a scale each."""
        return self.averages if self.states in ("8bit", "4bit") else ()

    def codes(self, name: str) -> Codes:
        """Return what one of `coded` is held as."""
        assert self.states is not None
        return codes_of(self.states, name)

    @property
    def packed(self) -> tuple[str, ...]:
        """Names of the state tensors whose bytes have two codes, flat as the scales are."""
        return self.coded if self.states == "4bit" else ()

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the state tensors that hold the scales of `coded`."""
        return tuple(map(scale_name, self.coded))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that one of `tensors` is held in."""
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
        """Return the elements of one of `tensors`, of a parameter of so many."""
        return num_bytes(self.codes(name), elements) if name in self.coded else elements

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors read, in the kernels' order; all but ``grad`` are written."""
        return ("param", "grad", *self.state)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the float32 numbers given with each parameter at each step."""
        return _SCALARS[self.algorithm] + (("clip",) if self.clipped else ())


_SCALARS = {
    "sgd": ("neg_lr", "momentum", "undamped", "weight_decay", "first"),
    "adamw": ("neg_step_size", "decay", "neg_lr_decay", "lerp", "beta2", "rest2", "root2", "eps"),
    "lion": ("neg_lr", "decay", "neg_lr_decay", "beta1", "rest1", "beta2", "rest2"),
    "muon direction": ("lerp", "lerp_ahead"),
    "muon move": ("neg_lr", "decay", "neg_lr_decay"),
}
_ORTHOGONALISED = {"muon direction": "param", "muon move": "grad"}  # bfloat16: what is multiplied, and what that makes


def scale_name(name: str) -> str:
    """Return what the scales of a state tensor are called."""
    return f"{name}_scale"


INTEGERS = ("key0", "key1", "step")
"""Names of the int32 numbers given with each parameter: its key, and the step that the random bits change with."""
