"""The maths of a rule as a graph of ATen nodes, for the printers."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from fxprec.numerics.trace import Kind, Traced
from fxprec.numerics.trace import trace as trace_function
from fxprec.runtime.optim import maths
from fxprec.runtime.optim.fma import as_one_node
from fxprec.runtime.optim.rule import INTEGERS, Rule

FLOAT: Kind = "float_scalar"
INT: Kind = "int_scalar"


@cache
def trace(rule: Rule) -> Traced:
    """Trace one step of ``rule``: inputs are its tensors, scalars and `INTEGERS`, and the element's ``index``; outputs
    the written tensors by name, and the masks ``nonzero`` and ``cancelled`` where they are counted."""
    kinds: dict[str, Kind] = dict.fromkeys(rule.tensors, "float")
    for names, kind in ((rule.scalars, FLOAT), (INTEGERS, INT)):
        kinds |= dict.fromkeys(names, kind)
    kinds["index"] = "int"

    def run(*values: Tensor) -> dict[str, Tensor]:
        given = dict(zip(kinds, values, strict=True))
        found = maths.step(rule, given, given, given["index"] if rule.stochastic else None)
        counted = {"nonzero": found.nonzero, "cancelled": found.cancelled}
        return found.values | {name: mask for name, mask in counted.items() if mask is not None}

    with as_one_node():
        return trace_function(run, kinds)
