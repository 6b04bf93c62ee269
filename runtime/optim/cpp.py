"""Generate and run the CPU kernel: all parameters of a group in one call, one read and one write of each tensor.

The kernel is printed from the trace of `maths`. Inductor's C++ builder (its compiler, flags and disk cache) compiles it
once per rule.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache

import torch
from torch import Tensor

from fxprec.numerics import cpp, native
from fxprec.numerics.dialects import CPP
from fxprec.numerics.printer import statements
from fxprec.runtime.optim import states
from fxprec.runtime.optim.rule import INTEGERS, Rule, scale_name
from fxprec.runtime.optim.trace import trace, trace_code, trace_scale

_FLAGS = ("-fno-math-errno",)  # with errno a square root is a call and a branch, so its loop is not vectorised
_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "Bfloat16",
    torch.float16: "Float16",
    torch.uint8: "uint8_t",
    torch.int8: "uint8_t",
}
_NUMBERS = {"float": "float", "Bfloat16": "float", "Float16": "float", "uint8_t": "int32_t"}


def source(rule: Rule) -> str:
    """Return the C++ source of a rule's kernel."""
    lines, outputs = statements(trace(rule), CPP)
    types = {name: _TYPES[rule.dtype_of(name)] for name in rule.tensors} | dict.fromkeys(rule.scales, "uint8_t")
    pointers = [
        f"{kind}* __restrict {name}_at = ({kind}*)row[{i + 1}];" for i, (name, kind) in enumerate(types.items())
    ]
    at = {name: f"{name}_codes[i - begin]" if name in rule.packed else f"{name}_at[i]" for name in rule.tensors}
    loads = [f"const {_NUMBERS[types[name]]} {name} = load({place});" for name, place in at.items()]
    scalars = [f"const float {name} = scalars[{i}];" for i, name in enumerate(rule.scalars)]
    scalars += [f"const int32_t {name} = integers[{i}];" for i, name in enumerate(INTEGERS)]
    begin = [f"const int32_t {name} = {name}_at[begin / kBlock];" for name in rule.scales]
    begin += [_UNPACK.replace("NAME", name) for name in rule.packed]
    begin += [f"float {name}_new[kBlock]; int32_t {name}_amax = 0;" for name in rule.coded]
    stores = [f"store({name}_at[i], {outputs[name]});" for name in outputs if name in types and name not in rule.coded]
    stores += [f"{name}s += {outputs[name]};" for name in ("nonzero", "cancelled") if name in outputs]
    stores += [_into_block(name, outputs[name]) for name in rule.coded]
    filled = {
        "PRELUDE": cpp.PRELUDE,
        "COLUMNS": str(len(types) + 1),
        "SCALARS": str(len(rule.scalars)),
        "INTEGERS": str(len(INTEGERS)),
        "BLOCK": str(states.BLOCK) if rule.coded else "kChunk",
        "POINTERS": "\n  ".join(pointers + scalars),
        "BEGIN": "\n    ".join(begin),
        "AMAX": "".join(f" reduction(max : {name}_amax)" for name in rule.coded),
        "BODY": "\n      ".join([*loads, *lines, *stores]),
        "END": "\n".join(_encoding(rule, name) for name in rule.coded),
    }
    text = native.text_beside(__file__, "kernel.cpp")
    for name, value in filled.items():
        text = text.replace(f"/*{name}*/", value)
    return text


def _into_block(name: str, value: str) -> str:
    magnitude = f"bits_of({value}) & kMagnitude"
    return f"{name}_new[i - begin] = {value}; {name}_amax = std::max({name}_amax, {magnitude});"


_UNPACK = """uint8_t NAME_codes[kBlock];
    for (int64_t j = 0; j < kBlock / 2; ++j) {
      NAME_codes[j] = NAME_at[begin / 2 + j] & 15;
      NAME_codes[j + kBlock / 2] = NAME_at[begin / 2 + j] >> 4;
    }"""
_PACK = """std::fill(NAME_codes + (end - begin), NAME_codes + kBlock, uint8_t(0));
      for (int64_t j = 0; j < kBlock / 2; ++j) {
        NAME_at[begin / 2 + j] = uint8_t(NAME_codes[j] | (NAME_codes[j + kBlock / 2] << 4));
      }"""


def _encoding(rule: Rule, name: str) -> str:
    """Return the C++ text that stores a block's new values of one state tensor, and their scale."""
    head, scale = statements(trace_scale(rule.codes(name)), CPP, {"amax": f"{name}_amax"})
    lines, outputs = statements(trace_code(rule.codes(name), name), CPP)
    is_packed = name in rule.packed
    to = f"{name}_codes[i - begin]" if is_packed else f"{name}_at[i]"
    body = "\n        ".join([f"const float x = {name}_new[i - begin];", *lines])
    return f"""    {{
      {" ".join(head)}
      const int32_t scale = {scale["scale"]};
      {scale_name(name)}_at[begin / kBlock] = uint8_t(scale);
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {{
        const int32_t index = int32_t(i);
        {body}
        {to} = uint8_t({outputs["code"]});
      }}
      {_PACK.replace("NAME", name) if is_packed else ""}
    }}"""


@cache
def library(rule: Rule) -> ctypes.CDLL | None:
    """Return the compiled kernel; without a compiler, warn and return None."""
    signature = (None, ctypes.c_int64, *[ctypes.c_void_p] * 4)
    slower = "the optimizer runs op by op, several times slower"
    return native.load_or_warn(source(rule), {"fxprec_optim_step": signature}, slower, _FLAGS)


def run(rule: Rule, rows: list[list[Tensor]], scalars: Tensor, integers: Tensor, counts: Tensor | None) -> bool:
    """Step every row of tensors in place; return False if no kernel compiles. Rows are those of `reference.run`, dense.

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
    """Return the number of elements, then the address of each tensor."""
    n, names = row[0].numel(), rule.tensors
    if all(rule.dtype_of(name) == rule.carrier for name in names):
        return [n, *native.addresses(names, row, rule.carrier, n)]
    found = [n]
    for name, t in zip((*names, *rule.scales), row, strict=True):
        is_scale = name not in names
        dtype, size = (torch.uint8, states.num_blocks(n)) if is_scale else (rule.dtype_of(name), rule.size_of(name, n))
        found += native.addresses((name,), (t,), dtype, size)
    return found
