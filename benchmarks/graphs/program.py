"""A program: statements over named values, printed as the source of a module's ``forward`` and run from it.

Names say what a value is: ``x0`` an input, ``w0`` a parameter, ``b0`` a buffer, ``p0`` a probe, ``v0`` what a statement
made. A probe is an input of zeros added to an intermediate value, so that its gradient is that value's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NAME = re.compile(r"\b[vxwbp]\d+\b")
_indices = itertools.count()


@dataclass(frozen=True)
class Statement:
    """One line of source, or a region of several around which ``text`` says what is done."""

    text: str
    """``v3 = v1 @ w0``; of a region its kind, a key of `REGIONS`."""
    inner: tuple[Statement, ...] = ()

    @property
    def names(self) -> set[str]:
        """Of all values it reads or makes."""
        return set(NAME.findall(self.text)).union(*(s.names for s in self.inner))

    @property
    def made(self) -> list[str]:
        """Names it binds for those after it."""
        if self.inner:
            found = [name for s in self.inner for name in s.made]
            return found if self.text in ALL_VISIBLE else found[-1:]
        left, equals, _ = self.text.partition(" = ")
        return NAME.findall(left) if equals and "[" not in left else []

    def lines(self) -> list[str]:
        """Return its source."""
        if not self.inner:
            return [self.text]
        inside = [line for s in self.inner for line in s.lines()]
        return REGIONS[self.text](inside, self.made[-1] if self.made else "None")


def _block(head: str) -> Callable[[list[str], str], list[str]]:
    return lambda inside, result: [head, *("    " + line for line in inside)]


def _function(call: str) -> Callable[[list[str], str], list[str]]:
    def lines(inside: list[str], result: str) -> list[str]:
        body = ["    " + line for line in [*inside, f"return {result}"]]
        return ["def region():", *body, f"{result} = {call}"]

    return lines


REGIONS: dict[str, Callable[[list[str], str], list[str]]] = {
    "checkpoint": _function("checkpoint(region, use_reentrant=False)"),
    "no_grad": _block("with torch.no_grad():"),
    "autocast": _block('with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):'),
    "loop": _block("for _ in range(2):"),
    "branch": _block("if x0.square().sum() >= 0:"),  # depends on data: a graph break
}
ALL_VISIBLE = {"no_grad", "autocast", "loop", "branch"}


@dataclass(frozen=True)
class Shape:
    """An input, parameter or buffer."""

    shape: tuple[int, ...]
    kind: str = "float"
    """``"float"``, ``"bool"``, or ``"int"``: an index from 0 to 3; of a buffer also ``"zero"`` and ``"one"``."""
    needs_gradient: bool = True

    def make(self, pick: torch.Generator) -> Tensor:
        """Return random values in float64, or what the kind says."""
        if self.kind == "int":
            return torch.randint(0, 4, self.shape, generator=pick)
        if self.kind == "bool":
            return torch.rand(self.shape, generator=pick) > 0.3
        if self.kind in ("zero", "one"):
            return torch.full(self.shape, float(self.kind == "one"), dtype=torch.float64)
        return torch.randn(self.shape, generator=pick).double()


@dataclass(frozen=True)
class Program:
    """What is compiled, how, and what comes in."""

    values: Mapping[str, Shape]
    """Inputs, parameters, buffers and probes by name."""
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `fxprec.Config`, and ``dynamic``, ``promotes`` and ``batches`` (see `check`)."""

    def of(self, kinds: str) -> Iterator[tuple[str, Shape]]:
        """Iterate over the values whose name starts with one of the letters."""
        return ((name, value) for name, value in self.values.items() if name[0] in kinds)

    @property
    def arguments(self) -> list[str]:
        """Names of forward's arguments."""
        return [name for name, _ in self.of("xp")]

    @property
    def is_narrow(self) -> bool:
        """Whether it computes some values in 16 bits."""
        texts = self.source
        return "self.low" in texts or "self.half" in texts or "self.mixed" in texts

    @property
    def source(self) -> str:
        """Python source of ``forward``."""
        loads = [f"{name} = self.{name}" for name, _ in self.of("wb")]
        body = [line for s in self.statements for line in s.lines()]
        lines = [*loads, *body, f"return [{', '.join(self.outputs)}]"]
        head = f"def forward(self, {', '.join(self.arguments)}):"
        return "\n".join([head, *("    " + line for line in lines)]) + "\n"

    def tensors(self, batch: int = 0) -> dict[str, Tensor]:
        """Return values for all names, float64; inputs and probes alone differ between batches."""
        pick = torch.Generator().manual_seed(0)
        found = {name: value.make(pick) for name, value in self.of("wb")}
        pick.manual_seed(1 + batch)
        return found | {name: value.make(pick) for name, value in self.of("xp")}


class Module(nn.Module):
    """A program as a module, in float32 or, to compare with, in float64."""

    def __init__(self, program: Program, wide: torch.dtype) -> None:
        super().__init__()
        exact = wide == torch.float64
        self.wide, self.low, self.half = wide, *((wide, wide) if exact else (torch.bfloat16, torch.float16))
        self.mixed = not exact
        tensors = program.tensors()
        for name, value in program.of("wb"):
            tensor = tensors[name].to(wide) if tensors[name].is_floating_point() else tensors[name]
            if name[0] == "w":
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=value.needs_gradient))
            else:
                self.register_buffer(name, tensor)


def namespace() -> dict[str, Any]:
    """Return what a program's source refers to."""
    return {"torch": torch, "F": F, "checkpoint": checkpoint}


def module_of(program: Program, wide: torch.dtype) -> Module:
    """Return the program as a module of a class of its own, whose code Dynamo has not seen."""
    scope = namespace()
    exec(compile(program.source, f"<program {next(_indices)}>", "exec"), scope)
    return type("Module", (Module,), {"forward": scope["forward"]})(program, wide)


def arguments_of(program: Program, wide: torch.dtype, batch: int) -> list[Tensor]:
    """Return fresh arguments of forward."""
    tensors = program.tensors(batch)
    found = []
    for name in program.arguments:
        tensor, value = tensors[name], program.values[name]
        if tensor.is_floating_point():
            tensor = tensor.to(wide).requires_grad_(value.needs_gradient)
        found.append(tensor)
    return found
