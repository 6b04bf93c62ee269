"""Trace the maths of a rule to graphs of ATen nodes, for the printers."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from fxprec.numerics.trace import Kind, Traced
from fxprec.numerics.trace import trace as trace_function
from fxprec.runtime.optim import maths, states
from fxprec.runtime.optim.fma import as_one_node
from fxprec.runtime.optim.rule import INTEGERS, Rule, scale_name
from fxprec.runtime.optim.states import Codes

FLOAT: Kind = "float_scalar"
INT: Kind = "int_scalar"


@cache
def trace(rule: Rule) -> Traced:
    """Trace one step of ``rule``. Inputs are its tensors and scales, scalars and `INTEGERS`, and the element's
    ``index``. Outputs are the written tensors by name, those of `Rule.coded` as float32, and the masks ``nonzero`` and
    ``cancelled`` if they are counted."""
    kinds: dict[str, Kind] = {name: "int" if name in rule.coded else "float" for name in rule.tensors}
    for names, kind in ((rule.scalars, FLOAT), ((*rule.scales, *INTEGERS), INT)):
        kinds |= dict.fromkeys(names, kind)
    kinds["index"] = "int"

    def run(*values: Tensor) -> dict[str, Tensor]:
        given = dict(zip(kinds, values, strict=True))
        given |= {name: states.decoded(rule.codes(name), given[name], given[scale_name(name)]) for name in rule.coded}
        found = maths.step(rule, given, given, given["index"] if rule.random else None)
        counted = {"nonzero": found.nonzero, "cancelled": found.cancelled}
        return found.values | {name: mask for name, mask in counted.items() if mask is not None}

    with as_one_node():
        return trace_function(run, kinds)


@cache
def trace_scale(codes: Codes) -> Traced:
    """Trace `states.scale_of`: from ``amax`` to ``scale``."""
    return trace_function(lambda amax: {"scale": states.scale_of(codes, amax)}, {"amax": INT})


@cache
def trace_code(codes: Codes, name: str) -> Traced:
    """Trace `states.code_of` for a new value: from ``x``, ``scale``, ``index`` and `INTEGERS` to ``code``."""
    kinds: dict[str, Kind] = {"x": "float", "scale": INT, "index": "int", **dict.fromkeys(INTEGERS, INT)}

    def run(x: Tensor, scale: Tensor, index: Tensor, *integers: Tensor) -> dict[str, Tensor]:
        random = states.bits(name, index, dict(zip(INTEGERS, integers, strict=True)))
        return {"code": states.code_of(codes, x, scale, random)}

    return trace_function(run, kinds)
