"""The counted tensors of a training step (Lee et al. 2023, section 4.1).

Definitions: docs/algorithms.md, "Operators, tensors, groups".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy

GROUP_META = "fxprec_group"  # of a node: the group its operator lies in, for profiler ranges

Kind = Literal["output", "param", "grad_output", "grad_param"]
KINDS: tuple[Kind, ...] = ("output", "param", "grad_output", "grad_param")


@dataclass(frozen=True, slots=True)
class CountedTensor:
    """One tensor that a precision is chosen for."""

    id: int
    """Position among the counted tensors of the graph."""
    name: str
    """FX node name of the forward value (of a gradient: of the value it is the gradient of)."""
    kind: Kind
    group: int
    """Group between two adjacent GEMMs, numbered in execution order."""
    elements: int
    """Number of elements at the traced sizes."""
    size: sympy.Expr
    """Number of elements as an expression in the dynamic dimensions."""
    module: str
    """Qualified name of the module that made it (of a parameter: that uses it first), or ``""``."""
    source: str
    """``file:line``, or ``""``."""
    feeds_gemm: bool
    """An output or parameter a GEMM multiplies, seen through views; a gradient that comes into a GEMM."""
    of_gemm: bool
    """A GEMM's result or parameter; a gradient of what feeds a GEMM."""
    saved: bool
    """A forward value that backward, or what it recomputes, starts from."""
    shape: str
    """For people: ``"s0 x 64 x 32 x 32"``."""
