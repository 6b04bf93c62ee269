"""Print traced ATen nodes as lines of source text, by one table of expressions per language (`dialects`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.numerics.trace import Traced


@dataclass(frozen=True)
class Dialect:
    """The syntax of one language for the nodes of a trace."""

    statement: str
    """A template with ``{type}``, ``{name}`` and ``{value}``."""
    types: Mapping[torch.dtype, str]
    number: Callable[[float, torch.dtype], str]
    """Prints a literal of a dtype."""
    expressions: Mapping[str, str]
    """The expression of each operator, by its name without the overload; ``{0}``, ``{1}``, ... are the arguments."""


@dataclass(frozen=True)
class Name:
    """The text of an input, as a number and as the float32 with the number's bits."""

    number: str
    as_float: str


def statements(
    traced: Traced, dialect: Dialect, inputs: Mapping[str, str | Name] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the lines that compute the outputs, and the name of the variable that holds each output.

    ``inputs`` names inputs that are not variables of their own names. Equal expressions are computed once.
    """
    called = {**{name: name for name in traced.inputs}, **(inputs or {})}
    placeholders = traced.graph.find_nodes(op="placeholder")
    names: dict[Node, str | Name] = {n: called[name] for n, name in zip(placeholders, traced.inputs, strict=True)}
    lines: list[str] = []
    known: dict[str, str] = {}
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        value = _expression(node, names, dialect)
        if value not in known:
            known[value] = f"t{len(lines)}"
            kind = dialect.types[node.meta["val"].dtype]
            lines.append(dialect.statement.format(type=kind, name=known[value], value=value))
        names[node] = known[value]
    return lines, {name: _number(names[node]) for name, node in traced.outputs.items()}


def _number(name: str | Name) -> str:
    return name.number if isinstance(name, Name) else name


def _expression(node: Node, names: Mapping[Node, str | Name], dialect: Dialect) -> str:
    operator = str(node.target).split(".")[1]
    dtype: torch.dtype = node.meta["val"].dtype
    inputs = node.all_input_nodes
    if operator == "view":
        source = names[inputs[0]]
        if isinstance(source, Name):
            return source.as_float
        return dialect.expressions["bits_of" if dtype == torch.int32 else "float_of"].format(source)
    operand_dtype = inputs[-1].meta["val"].dtype if inputs else dtype

    def argument(value: object) -> str:
        if isinstance(value, Node):
            return _number(names[value])
        assert isinstance(value, int | float), f"{node.format_node()} has an argument no printer knows"
        return dialect.number(value, operand_dtype)

    arguments = [argument(value) for value in node.args]
    assert operator in dialect.expressions, f"no printer knows {node.target}"
    return dialect.expressions[operator].format(*arguments)
