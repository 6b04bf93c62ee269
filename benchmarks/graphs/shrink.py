"""Make a failing program small: fewer statements, options, outputs, while the same kind of failure stays."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.graphs.check import Finding, check
from benchmarks.graphs.generate import runs
from benchmarks.graphs.program import Program, Statement

DEFAULTS = {"storage": "packed", "low_ratio": 1.0, "grouping": "execution", "grad_scaling": "auto",
            "peak_budget": None, "dynamic": False, "promotes": False, "batches": 1}  # fmt: skip


def shrunk(program: Program, finding: Finding, seconds: float = 60.0) -> Program:
    """Return the smallest program found in the time given that fails in the same way."""
    end = time.monotonic() + seconds

    def fails(candidate: Program) -> bool:
        return runs(candidate) and finding.is_like(check(candidate))

    better: Program | None = program
    while better is not None and time.monotonic() < end:
        program = better
        better = next((c for c in _smaller(program) if time.monotonic() < end and fails(c)), None)
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Iterate over programs a little smaller, the boldest first."""
    for change in (_fewer_outputs, _fewer_statements, _bypassed, _unwrapped, _plainer_options):
        for candidate in change(program):
            yield _tidied(candidate)


def _fewer_outputs(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield replace(program, outputs=(name,))
        for i in range(len(program.outputs)):
            yield replace(program, outputs=program.outputs[:i] + program.outputs[i + 1 :])


def _fewer_statements(program: Program) -> Iterator[Program]:
    """Leave out the end of the program (its last value is then the output), or single statements."""
    for i, statement in enumerate(program.statements):
        if statement.made and i < len(program.statements) - 1:
            yield replace(program, statements=program.statements[: i + 1], outputs=(statement.made[-1],))
    for i in reversed(range(len(program.statements))):
        yield replace(program, statements=program.statements[:i] + program.statements[i + 1 :])


def _bypassed(program: Program) -> Iterator[Program]:
    """Read one of its operands in place of what a statement makes."""
    for i in reversed(range(len(program.statements))):
        statement = program.statements[i]
        for made in statement.made:
            for operand in sorted(statement.names - set(statement.made)):
                rest = tuple(_renamed(s, made, operand) for s in program.statements[i + 1 :])
                outputs = tuple(operand if name == made else name for name in program.outputs)
                yield replace(program, statements=program.statements[:i] + rest, outputs=outputs)


def _unwrapped(program: Program) -> Iterator[Program]:
    for i, statement in enumerate(program.statements):
        if statement.inner:
            before, after = program.statements[:i], program.statements[i + 1 :]
            yield replace(program, statements=(*before, *statement.inner, *after))
            for k in range(len(statement.inner)):
                less = replace(statement, inner=statement.inner[:k] + statement.inner[k + 1 :])
                yield replace(program, statements=(*before, less, *after) if less.inner else (*before, *after))


def _plainer_options(program: Program) -> Iterator[Program]:
    for name, value in DEFAULTS.items():
        if program.options.get(name) != value:
            yield replace(program, options={**program.options, name: value})


def _renamed(statement: Statement, old: str, new: str) -> Statement:
    text = re.sub(rf"\b{old}\b", new, statement.text)
    return Statement(text, tuple(_renamed(s, old, new) for s in statement.inner))


def _tidied(program: Program) -> Program:
    """Leave out what is never read: values, and statements that only make such."""
    statements, wanted = list(program.statements), set(program.outputs)
    kept: list[Statement] = []
    for statement in reversed(statements):
        writes = not statement.made or statement.inner or "_(" in statement.text
        if writes or wanted & set(statement.made):
            kept.insert(0, statement)
            wanted |= statement.names
    used = {name for s in kept for name in s.names} | set(program.outputs)
    if any(s.text == "branch" for s in kept):
        used.add("x0")
    return replace(
        program, statements=tuple(kept), values={name: v for name, v in program.values.items() if name in used}
    )
