"""The generated CPU kernel: all parameters of a group in one call, one read and one write of each tensor.

Printed from the trace of `maths`, compiled once for each rule by Inductor's own C++ builder (its compiler, flags and
disk cache).
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fxprec.numerics import cpp, native
from fxprec.numerics.dialects import CPP
from fxprec.numerics.printer import statements
from fxprec.runtime.optim.rule import INTEGERS, Rule
from fxprec.runtime.optim.trace import trace

_TEMPLATE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-fno-math-errno",)  # with errno a square root is a call and a branch, and nothing is vectorised
_CODES = {torch.float32: "float", torch.bfloat16: "Bfloat16", torch.float16: "Float16"}


def source(rule: Rule) -> str:
    """Return the C++ source of a rule's kernel."""
    lines, outputs = statements(trace(rule), CPP)
    names = rule.tensors
    code = _CODES[rule.carrier]
    pointers = [f"{code}* __restrict {name}_at = ({code}*)row[{i + 1}];" for i, name in enumerate(names)]
    loads = [f"const float {name} = load({name}_at[i]);" for name in names]
    scalars = [f"const float {name} = scalars[{i}];" for i, name in enumerate(rule.scalars)]
    scalars += [f"const int32_t {name} = integers[{i}];" for i, name in enumerate(INTEGERS)]
    stores = [f"store({name}_at[i], {outputs[name]});" for name in names if name in outputs]
    stores += [f"{name}s += {outputs[name]};" for name in ("nonzero", "cancelled") if name in outputs]
    indent = "\n    "
    filled = {
        "PRELUDE": cpp.PRELUDE,
        "COLUMNS": str(len(names) + 1),
        "SCALARS": str(len(rule.scalars)),
        "INTEGERS": str(len(INTEGERS)),
        "POINTERS": "\n  ".join(pointers + scalars),
        "BODY": indent.join([*loads, *lines, *stores]),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, value in filled.items():
        text = text.replace(f"/*{name}*/", value)
    return text


@cache
def library(rule: Rule) -> ctypes.CDLL | None:
    """The compiled kernel, or None, with a warning, without a compiler."""
    signature = (None, ctypes.c_int64, *[ctypes.c_void_p] * 4)
    slower = "the optimizer runs op by op, several times slower"
    return native.load_or_warn(source(rule), {"fxprec_optim_step": signature}, slower, _FLAGS)


def run(rule: Rule, rows: list[list[Tensor]], scalars: Tensor, integers: Tensor, counts: Tensor | None) -> bool:
    """Step every row of tensors (`Rule.tensors`; dense, equal layout) in place; False where no kernel compiles.

    ``scalars``: float32 (rows, `Rule.scalars`); ``integers``: int32 (rows, `INTEGERS`); ``counts``: int64 (rows, 2),
    to which the numbers of non-zero and of cancelled updates are added.
    """
    loaded = library(rule)
    if loaded is None:
        return False
    count = len(rows)
    table = array("q", [number for row in rows for number in _entries(rule, row)])
    numbers = (
        native.address("scalars", scalars, torch.float32, count * len(rule.scalars)),
        native.address("integers", integers, torch.int32, count * len(INTEGERS)),
        0 if counts is None else native.address("counts", counts, torch.int64, count * 2),
    )
    loaded.fxprec_optim_step(count, table.buffer_info()[0], *numbers)
    return True


def _entries(rule: Rule, row: list[Tensor]) -> list[int]:
    """Number of elements, then the address of each tensor."""
    n = row[0].numel()
    return [n, *native.addresses(rule.tensors, row, rule.carrier, n)]
