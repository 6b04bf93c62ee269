"""From traced ATen nodes to lines of source text: one walk, one table of expressions per language."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.runtime.optim.trace import Traced

_UNCHANGED = ("aten.detach.default",)


@dataclass(frozen=True)
class Dialect:
    """How one language writes the nodes of a trace."""

    statement: str
    """With ``{type}``, ``{name}`` and ``{value}``."""
    types: Mapping[torch.dtype, str]
    number: Callable[[float, torch.dtype], str]
    """A literal of that dtype."""
    expressions: Mapping[str, str]
    """By operator name, without the overload: with ``{0}``, ``{1}``, ... for the arguments."""


def statements(traced: Traced, dialect: Dialect) -> tuple[list[str], dict[str, str]]:
    """Return the lines that compute the outputs, and the name of the variable that holds each output.

    The inputs are variables of their own names.
    """
    names = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), traced.inputs, strict=True))
    lines: list[str] = []
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        if str(node.target) in _UNCHANGED:
            names[node] = names[node.args[0]]
            continue
        names[node] = f"t{len(lines)}"
        dtype = node.meta["val"].dtype
        value = _expression(node, names, dialect)
        lines.append(dialect.statement.format(type=dialect.types[dtype], name=names[node], value=value))
    return lines, {name: names[node] for name, node in traced.outputs.items()}


def _expression(node: Node, names: Mapping[Node, str], dialect: Dialect) -> str:
    operator = str(node.target).split(".")[1]
    dtype: torch.dtype = node.meta["val"].dtype
    if operator == "view":
        operator = "bits_of" if dtype == torch.int32 else "float_of"
        return dialect.expressions[operator].format(names[node.all_input_nodes[0]])
    inputs = node.all_input_nodes
    operand_dtype = inputs[-1].meta["val"].dtype if inputs else dtype

    def argument(value: object) -> str:
        if isinstance(value, Node):
            return names[value]
        assert isinstance(value, int | float), f"{node.format_node()} has an argument no printer knows"
        return dialect.number(value, operand_dtype)

    arguments = [argument(value) for value in node.args]
    assert operator in dialect.expressions, f"no printer knows {node.target}"
    return dialect.expressions[operator].format(*arguments)
