"""The counted tensors of a training step (Lee et al. 2023, section 4.1).

Definitions: docs/algorithms.md, "Operators, tensors, groups".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy

Kind = Literal["output", "param", "grad_output", "grad_param"]
KINDS: tuple[Kind, ...] = ("output", "param", "grad_output", "grad_param")


@dataclass(frozen=True, slots=True)
class CountedTensor:
    """One tensor that a precision is chosen for."""

    id: int
    """Position among the counted tensors of the graph."""
    name: str
    """FX node name of the forward value; a gradient has the name of its value."""
    kind: Kind
    group: int
    """Group between two adjacent GEMMs, numbered in execution order."""
    elements: int
    """Number of elements at the traced sizes."""
    size: sympy.Expr
    """Number of elements as an expression in the dynamic dimensions."""
    module: str
    """Qualified name of the module that computed the tensor, or that first uses the parameter, or ``""``."""
    source: str
    """``file:line``, or ``""``."""
    feeds_gemm: bool
    """Whether a GEMM multiplies it, seen through views; for an output's gradient, whether a GEMM computes the
    output."""
    of_gemm: bool
    """Whether it is a GEMM's result or parameter; for an output's gradient, whether a GEMM multiplies the output."""
    saved: bool
    """Whether backward, or a recomputation in backward, reads this forward value."""
    shape: str
    """The shape as text: ``"s0 x 64 x 32 x 32"``."""
