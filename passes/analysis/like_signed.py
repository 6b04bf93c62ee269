"""Recognise polynomials of one value whose terms have one sign, such as the argument of tanh in GELU.

A term c x^k has k times the relative error of x. Terms of one sign do not cancel. So the relative error of their sum is
at most that of the highest power.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.fx import Node

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.ops import aten

_LARGEST_DEGREE = 3


@dataclass(frozen=True)
class LikeSigned:
    """A polynomial whose powers are all even or all odd, and whose coefficients have one sign."""

    degree: int
    is_negative: bool
    source: Node | None = None
    """The value that powers are taken of; None for a number."""
    is_odd: bool = False
    nodes: tuple[Node, ...] = ()
    """The nodes that compute it from the source, in order."""

    def __mul__(self, other: LikeSigned) -> LikeSigned | None:
        found = self._with(other)
        sign, odd = self.is_negative != other.is_negative, self.is_odd != other.is_odd
        return found and replace(found, degree=self.degree + other.degree, is_negative=sign, is_odd=odd)

    def __add__(self, other: LikeSigned) -> LikeSigned | None:
        cancels = (self.is_negative, self.is_odd) != (other.is_negative, other.is_odd)
        return None if cancels else self._with(other)

    def __neg__(self) -> LikeSigned:
        return replace(self, is_negative=not self.is_negative)

    def __pow__(self, power: object) -> LikeSigned | None:
        if not isinstance(power, int | float) or power < 1 or power != int(power):
            return None
        is_odd = power % 2 == 1
        return replace(
            self,
            degree=self.degree * int(power),
            is_negative=self.is_negative and is_odd,
            is_odd=self.is_odd and is_odd,
        )

    def _with(self, other: LikeSigned) -> LikeSigned | None:
        """Return a polynomial of both sources and nodes, of the higher degree; None if the sources differ."""
        if None not in (self.source, other.source) and self.source is not other.source:
            return None
        nodes = (*self.nodes, *(n for n in other.nodes if n not in self.nodes))
        return replace(self, degree=max(self.degree, other.degree), source=self.source or other.source, nodes=nodes)


def like_signed(arg: object, is_source: Callable[[Node], bool], depth: int = 8) -> LikeSigned | None:
    """Return a node's argument as a like-signed polynomial of one source, at most a cubic; None if it is not one.

    A source that is itself computed from another one by at most ``depth`` operators counts as computed.
    """
    if isinstance(arg, int | float):
        return LikeSigned(0, is_negative=arg < 0) if arg and math.isfinite(arg) else None
    if not isinstance(arg, Node):
        return None
    found = _computed(arg, is_source, depth - 1) if depth and arg.op == "call_function" and arg.args else None
    if found is not None and found.degree <= _LARGEST_DEGREE and found.source is not None:
        return replace(found, nodes=(*found.nodes, arg))
    return LikeSigned(1, is_negative=False, source=arg, is_odd=True) if is_source(arg) else None


def _computed(node: Node, is_source: Callable[[Node], bool], depth: int) -> LikeSigned | None:
    if len(node.args) > 2 or "alpha" in node.kwargs:
        return None
    a = like_signed(node.args[0], is_source, depth)
    if a is None or node.target in ops.CASTS:
        return a
    if node.target is aten.neg.default:
        return -a
    b = like_signed(node.args[-1], is_source, depth)
    if b is None:
        return None
    match node.target:
        case aten.add.Tensor | aten.add.Scalar:
            return a + b
        case aten.sub.Tensor | aten.sub.Scalar:
            return a + -b
        case aten.mul.Tensor | aten.mul.Scalar:
            return a * b
        case aten.div.Tensor | aten.div.Scalar if b.source is None:
            return a * b
        case aten.pow.Tensor_Scalar:
            return a ** node.args[1]
    return None
