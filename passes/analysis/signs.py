"""Find the backward nodes that compare a stored copy with a number: with 0, as a ReLU's, or with another bound."""

from __future__ import annotations

from torch.fx import Node

from fxprec.ir.operators import Trait, having
from fxprec.passes.analysis.joint import argument, is_view_or_cast, readers

TESTS_ABOVE = having(Trait.TESTS_ABOVE)
TESTS_BELOW = having(Trait.TESTS_BELOW)


def bounds(read: Node) -> set[tuple[object, float]]:
    """Return (comparison, bound) for each comparison of a copy with a number; ``sign`` has the bound 0."""
    found = {(reader.target, argument(reader, 1, 0)) for _, reader in readers(read, is_view_or_cast)}
    return {
        (target, float(bound))
        for target, bound in found
        if target in TESTS_ABOVE | TESTS_BELOW and isinstance(bound, int | float)
    }


def is_compared_with_0(read: Node) -> bool:
    """Return whether backward compares a copy with 0."""
    return any(bound == 0 for _, bound in bounds(read))
