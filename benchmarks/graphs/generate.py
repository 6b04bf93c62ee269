"""Random programs, one a seed: each statement is tried in eager PyTorch before it is taken."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.graphs.operations import MIX, Template
from benchmarks.graphs.program import (
    Module,
    Program,
    Shape,
    Statement,
    arguments_of,
    module_of,
    namespace,
)
from benchmarks.graphs.values import weighted_sum

FORMS = [(4, 6), (6, 6), (2, 3, 6), (2, 4, 4, 4), (3, 4), (8,), (1, 6), (2, 1, 4)]
SIZES = (1, 3, 4, 6)
STATEMENTS = 14
LARGEST, MOST = 100.0, 1024  # magnitude, elements
UNFIT = (RuntimeError, IndexError, ValueError, TypeError, NameError, AssertionError)
REGIONS = ("checkpoint", "checkpoint", "autocast", "no_grad", "loop", "branch")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "storage": ("packed", "packed", "simulate", "native"),
    "low_ratio": (1.0, 1.0, 0.5),
    "grouping": ("execution", "execution", "dataflow"),
    "grad_scaling": ("auto", "auto", "none", "fixed"),
    "peak_budget": (None, None, None, None, None, "70%"),
    "dynamic": (False, False, False, True),
    "promotes": (False, False, True),
    "batches": (1, 2),
}


def program_of(seed: int, statements: int = STATEMENTS) -> Program:
    """Return the program of a seed, of at most so many statements; it runs forward and backward in eager PyTorch."""
    for attempt in range(50):
        program = _Maker(random.Random(f"{seed}.{attempt}"), statements).make()
        if runs(program):
            return program
    raise RuntimeError(f"no program of seed {seed} runs")


def runs(program: Program) -> bool:
    """Return whether it runs in both precisions: what is computed in place may be wanted by backward."""
    try:
        for wide in (torch.float32, torch.float64):
            for batch in range(program.options["batches"]):
                with torch.random.fork_rng(devices=[]):
                    loss = weighted_sum(module_of(program, wide)(*arguments_of(program, wide, batch)))
                if not loss.requires_grad or not loss.isfinite():
                    return False
                loss.backward()
    except UNFIT:
        return False
    return True


class _Maker:
    def __init__(self, pick: random.Random, statements: int) -> None:
        self.pick, self.most = pick, statements
        self.values: dict[str, Shape] = {}
        self.scope = namespace()
        self.live: list[str] = []  # float values, in the order they were made
        self.count: dict[str, int] = {}
        self.mixed = pick.random() < 0.25
        self.probes = pick.choice((0.0, 0.3, 1.0))
        self.breaks = pick.random() < 0.15

    def make(self) -> Program:
        self._inputs()
        length = self.pick.randint(3, self.most)
        statements: list[Statement] = []
        while len(statements) < length:
            statements += self._region() if self.pick.random() < 0.06 else self._statements()
        options = {name: self.pick.choice(values) for name, values in OPTIONS.items()}
        return Program(self.values, tuple(statements), self._outputs(statements), _allowed(options))

    def _new(self, letter: str) -> str:
        number = self.count[letter] = self.count.get(letter, -1) + 1
        return f"{letter}{number}"

    def _inputs(self) -> None:
        form = self.pick.choice(FORMS)
        shapes = [form, form if self.pick.random() < 0.5 else self.pick.choice(FORMS)]
        for shape in shapes[: self.pick.randint(1, 2)]:
            self._add("x", Shape(shape, needs_gradient=self.pick.random() < 0.6))
        self._add("x", Shape((4,) if self.pick.random() < 0.5 else form[:-1], "int"))
        self._add("x", Shape(form if self.pick.random() < 0.6 else form[-1:], "bool"))
        blank = Module(Program({}, (), ()), torch.float32)
        blank.mixed = self.mixed
        self.scope["self"] = blank

    def _add(self, letter: str, shape: Shape) -> str:
        name = self._new(letter)
        self.values[name] = shape
        value = shape.make(torch.Generator().manual_seed(len(self.values)))
        if value.is_floating_point():
            value = value.float().requires_grad_(shape.needs_gradient and letter in "xwp")
            if letter == "x":
                self.live.append(name)
        self.scope[name] = value
        return name

    def _statements(self) -> list[Statement]:
        for _ in range(20):
            kind = self.pick.choices(list(MIX), [weight for weight, _ in MIX.values()])[0]
            if (kind == "dtypes" and not self.mixed) or (kind == "breaks" and not self.breaks):
                continue
            template = self.pick.choice(MIX[kind][1])
            if ("self.low" in template.text or "self.half" in template.text) and not self.mixed:
                continue
            before = dict(self.values), dict(self.count)
            if (statement := self._tried(template)) is not None:
                return [statement, *self._probe(statement)]
            self.values, self.count = before
        return []

    def _tried(self, template: Template) -> Statement | None:
        """Return the statement where it runs and gives numbers of a reasonable size."""
        operands = {letter: self._operand() for letter in "abc"}
        operands |= {letter: self._of_kind(kind) for letter, kind in (("i", "int"), ("m", "bool"))}
        try:
            operands |= self._made_for(template, self.scope[operands["a"]])
        except (IndexError, RuntimeError):
            return None
        text = template.text.format(**operands)
        names = [self._new("v") for _ in range(template.results)]
        statement = Statement(f"{', '.join(names)} = {text}" if names else text)
        return statement if self._executes(statement, names) else None

    def _executes(self, statement: Statement, names: list[str]) -> bool:
        copies = {name: value for name, value in self.scope.items() if isinstance(value, Tensor)}
        try:
            with torch.random.fork_rng(devices=[]):
                exec("\n".join(statement.lines()), self.scope)
        except UNFIT:
            self.scope.update(copies)
            return False
        made = [self.scope[name] for name in names] if names else [self.scope[n] for n in self.live]
        if not all(isinstance(value, Tensor) and _is_tame(value) for value in made):
            return False
        self.live += [name for name in names if self.scope[name].is_floating_point()]
        return True

    def _operand(self) -> str:
        recent = self.live[-3:]
        return self.pick.choice(recent if self.pick.random() < 0.65 else self.live)

    def _of_kind(self, kind: str) -> str:
        return self.pick.choice([name for name, value in self.values.items() if name[0] == "x" and value.kind == kind])

    def _made_for(self, template: Template, a: Tensor) -> dict[str, str]:
        letters = [letter for letter in "wuzr" if f"{{{letter}}}" in template.text]
        n = self.pick.choice(SIZES)
        found = {}
        for letter, expression in zip(letters, template.shapes, strict=True):
            shape = eval(expression, {"a": a, "n": n})
            kind = {"z": "zero", "r": "one"}.get(letter, "float")
            wanted = "b" if letter in "zr" else "w"
            known = [
                name for name, v in self.values.items() if name[0] == wanted and (v.shape, v.kind) == (shape, kind)
            ]
            reused = known and self.pick.random() < 0.4
            found[letter] = self.pick.choice(known) if reused else self._add(wanted, Shape(shape, kind))
        return found

    def _probe(self, statement: Statement) -> list[Statement]:
        found = []
        for name in statement.made:
            if name in self.live and self.pick.random() < self.probes:
                probe = self._add("p", Shape(tuple(self.scope[name].shape), "zero"))
                made = self._new("v")
                added = Statement(f"{made} = {name} + {probe}.to({name}.dtype)")
                self._executes(added, [made])
                self.live.remove(name)
                found.append(added)
        return found

    def _region(self) -> list[Statement]:
        kind = self.pick.choice(REGIONS)
        if (kind == "autocast" and not self.mixed) or (kind == "branch" and not self.breaks):
            kind = "checkpoint"
        before = list(self.live)
        inner = [s for _ in range(self.pick.randint(1, 4)) for s in self._statements()]
        region = Statement(kind, tuple(inner))
        if not inner or not region.made:
            return inner
        visible = set(region.made)
        self.live = [name for name in self.live if name in before or name in visible]
        return [region]

    def _outputs(self, statements: list[Statement]) -> tuple[str, ...]:
        read = {name for s in statements for name in s.names - set(s.made)}
        ends = [name for name in self.live if name not in read and name[0] == "v"]
        more = [name for name in self.live if name not in ends and self.pick.random() < 0.15]
        found = [*ends, *more] or self.live[-1:]
        self.pick.shuffle(found)
        return tuple(found)


def _is_tame(value: Tensor) -> bool:
    if value.numel() > MOST or value.dtype == torch.float64:
        return False
    value = value.detach()
    return not value.is_complex() and (not value.numel() or bool((value.float().abs() < LARGEST).all()))


def _allowed(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what contradicts another option."""
    if options["storage"] == "simulate":
        options.update(peak_budget=None)
    if options["peak_budget"] is not None:
        options.update(low_ratio=None)
    if options["promotes"]:
        options["batches"] = 2
    return options


def without(program: Program, dropped: int) -> Program:
    """Return a program less one statement."""
    return replace(program, statements=(*program.statements[:dropped], *program.statements[dropped + 1 :]))
