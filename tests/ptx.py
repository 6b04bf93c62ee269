"""A few instructions of the PTX ISA on tensors, a thread an element: what the text of an inline cast does."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import torch
from torch import Tensor

Cast = Callable[[Tensor], Tensor]
_MASK = (1 << 32) - 1


def run(text: str, inputs: list[Tensor], casts: dict[str, Cast]) -> Tensor:
    """Run ``text`` with float32 ``inputs`` as $1, $2, ...; return $0, (threads,) int64.

    ``casts`` are the conversions of two numbers to codes, by instruction. A branch leaves threads out up to its label.
    """
    body = re.fullmatch(r"\{ (.*); (\w+): \}", text)
    assert body is not None
    lines, label = body[1].split("; "), body[2]
    threads = _Threads({f"${i}": x for i, x in enumerate(inputs, 1)}, casts, label, torch.ones_like(inputs[0]) > 0)
    for line in lines:
        threads.step(line)
    return threads.values["$0"]


class _Threads:
    def __init__(self, values: dict[str, Tensor], casts: dict[str, Cast], label: str, active: Tensor) -> None:
        self.values, self.casts, self.label, self.active = values, casts, label, active

    def step(self, line: str) -> None:
        if line.startswith(".reg"):
            return
        predicate, name, rest = re.fullmatch(r"(?:@(\w+) )?([\w.]+) (.*)", line).groups()  # type: ignore[union-attr]
        takes = self.active if predicate is None else self.active & self.values[predicate]
        if name == "bra":
            assert rest == self.label
            self.active = self.active & ~takes
            return
        pair = re.fullmatch(r"(\S+), \{(\w+), (\w+)\}", rest)
        to, *operands = pair.groups() if pair else rest.split(", ")
        found = self._result(name, [self._value(operand) for operand in operands], is_pair=pair is not None)
        before = self.values.get(to)
        self.values[to] = found if before is None or bool(takes.all()) else torch.where(takes, found, before)

    def _value(self, operand: str) -> Tensor:
        if operand in self.values:
            return self.values[operand]
        if operand.startswith("0f"):
            return torch.tensor(struct.unpack(">f", bytes.fromhex(operand[2:]))[0])
        return torch.tensor(int(operand))

    def _result(self, name: str, x: list[Tensor], *, is_pair: bool) -> Tensor:
        if name in self.casts:
            return self.casts[name](x[0]) << 8 | self.casts[name](x[1])
        if is_pair:
            return x[1] << 16 | x[0]
        return _OPERATORS[name](*x)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.int64) & _MASK if x.dtype == torch.float32 else x


def _insert(a: Tensor, b: Tensor, at: Tensor, length: Tensor) -> Tensor:
    field = ((1 << int(length)) - 1) << int(at)
    return (b & ~field) | ((a << int(at)) & field)


_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "abs.f32": torch.abs,
    "max.NaN.f32": torch.maximum,
    "setp.num.f32": lambda a, b: ~(a.isnan() | b.isnan()),
    "setp.lt.f32": torch.lt,
    "mov.b32": _bits,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "setp.eq.u32": torch.eq,
    "setp.gt.u32": torch.gt,
    "bfi.b32": _insert,
}
