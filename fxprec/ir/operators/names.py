"""Operators by name. A name that torch lacks is an error at import, so every row of the table matches an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxprec.compat.versions import NEWEST_TORCH, torch_version
from fxprec.ir.operators.spec import Spec

_NAMESPACES = ("prims", "fxprec")
"""Namespaces of names that are not ATen's."""


@dataclass(frozen=True)
class Row:
    """Operators that share one entry in all columns."""

    names: str
    spec: Spec


def row(names: str, **columns: Any) -> Row:
    """Return a row for names: ``add.Tensor``; ``exp`` for ``exp.default``; ``prims.sum``; ``exp.*``: all overloads."""
    return Row(names, Spec(**columns))


def existing(names: str) -> list[object]:
    """Resolve operators' names, in their order. Raises `LookupError` for a name that a supported torch lacks."""
    found = {name: _resolved(name) for name in names.split()}
    missing = [name for name, op in found.items() if op is None]
    if missing and torch_version() <= NEWEST_TORCH:
        raise LookupError(f"torch {torch.__version__} has no operator {', '.join(missing)}")
    return [op for op in found.values() if op is not None]


def _resolved(name: str) -> object:
    space, _, rest = name.partition(".")
    namespace = getattr(torch.ops, space if space in _NAMESPACES else "aten")
    packet, _, overload = (rest if space in _NAMESPACES else name).partition(".")
    found = getattr(namespace, packet, None)
    return found if overload == "*" else getattr(found, overload or "default", None)


def collected(*families: tuple[Row, ...]) -> dict[object, Spec]:
    """Return the rows by operator. Raises `ValueError` for an operator that is in two rows."""
    table: dict[object, Spec] = {}
    for found in (found for family in families for found in family):
        operators = existing(found.names)
        for operator in operators:
            if operator in table:
                raise ValueError(f"{operator} stands in two rows")
            table[operator] = found.spec
    return table
