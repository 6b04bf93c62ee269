"""Rows of a model's operators as measured: how rounding the tensors that their backward reads changes the gradient.

``measured.json`` lists for each operator the tensors that backward reads (the operands, the result). For each format it
gives the relative error of the gradients if backward reads a copy in that format. ``python -m benchmarks.yardsticks
sensitivity`` writes the file, from the samples of torch's op_db.

A number in e4m3fn is off by 2^-4 at most, in bfloat16 by 2^-8. A backward that is linear in what it reads passes that
error on. An operator that passes on more than ``TIMES`` as much in e4m3fn is sensitive: backward reads ``hi``. If it
also passes on more than ``TIMES`` 2^-8 in bfloat16, backward reads the value itself. Samples can show that rounding
harms, but not that it is harmless. So an operator counts as tolerating rounding in three cases only: its samples cover
its whole domain, its backward reads nothing that could be stored, or a row by hand says so (``models``). The other
operators have no row, like an operator that was never measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fxprec.ir.operators.names import Row, row
from fxprec.ir.operators.spec import HighReason, Trait

TIMES = 3
E4M3FN, BF16 = 2.0**-4, 2.0**-8
ROLES = ("operands", "result")
MEASURED: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("measured.json").read_text(encoding="utf-8")
)["operators"]
SAMPLES_ONLY = HighReason("a few samples of its gradient were measured, and not all of its domain", as_it_is=True)


def verdict(errors: Mapping[str, Any], *, covered: bool = True) -> HighReason | None:
    """Return why the tensor that backward reads stays above 8 bits; None if 8 bits are enough."""
    is_spoiled = errors["bf16"] > TIMES * BF16
    if is_spoiled or (covered and errors["e4m3fn"] > TIMES * E4M3FN):
        fmt = "bf16" if is_spoiled else "e4m3fn"
        why = f"read from a {fmt} copy, it changes its gradient by {_text(errors[fmt])}"
        return HighReason(why, as_it_is=is_spoiled)
    return None if covered else SAMPLES_ONLY


def _text(error: float) -> str:
    return f"{error:.0%}" if error < 10 else "more than ten times its size"


def rows(by_hand: frozenset[str]) -> Iterator[Row]:
    """Yield a row for each operator of this torch that is known well enough and has no row ``by_hand``."""
    for name, entry in MEASURED.items():
        packet = name.removeprefix("aten.")
        kept = {role: verdict(entry[role], covered=entry["covered"]) for role in ROLES if role in entry}
        found: dict[str, Any] = {role: why for role, why in kept.items() if why is not None}
        is_known = not found or set(found.values()) != {SAMPLES_ONLY}
        if is_known and packet not in by_hand and hasattr(torch.ops.aten, packet):
            yield row(f"{packet}.*", **(found or {"traits": Trait.BEARS_ROUNDING}))
