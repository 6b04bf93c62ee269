"""Estimate by how much a recomputation enlarges the rounding errors of the copies that it starts from.

A chain of pointwise operators is evaluated for random elements, once exactly and once with each source off by a share
of random sign. The relative error of all results together, over that of a source, is the chain's amplification. It is 1
for a multiple, 1.4 for a product of two sources, 2 for a square, about |x| for exp(x), and any number for a difference
that cancels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.fx import Node

from fxprec.compat import unset_fake_temporarily
from fxprec.ir.operators import Moves, moving_as
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import is_view_or_cast, numel_hint, tensor_of, value
from fxprec.passes.analysis.replay.kernels import Kind, can_repeat, is_square, kind_of
from fxprec.passes.casts.stored import STATISTIC

_PARTS = moving_as(Moves.PART, Moves.PARTS) | {operator.getitem}
_LOOPS = (Kind.FUSED, Kind.VIEW)
_ELEMENTS = 4096
_ERROR = 2.0**-5
_SCALES = (0.125, 1.0, 4.0)
"""Standard deviations of the sources: a function may amplify errors near 0 only, or for large arguments only."""


def amplification(node: Node, is_source: Callable[[Node], bool], undecoded: Callable[[Node], Node]) -> float:
    """Return the amplification of recomputing ``node`` from the nearest sources; inf if it cannot be evaluated.

    ``undecoded`` returns the value whose decoded copy a node is, or the node itself.
    """
    return max(_Chain(node, is_source, undecoded, scale).amplification() for scale in _SCALES)


def may_cancel(node: Node, is_source: Callable[[Node], bool], undecoded: Callable[[Node], Node]) -> bool:
    """Return whether a node is the difference of two sources, or of two parts of one.

    The features of two views of an image are, or those of two frames. They may be nearly equal, and the rounding errors
    of copies are then larger than the difference. `amplification` does not see that: its elements are independent.
    """
    if node.target not in ops.DIFFERENCES:
        return False
    operands = [n for n in node.args if isinstance(n, Node)]
    return len(operands) == 2 and all(_shows_source(n, is_source, undecoded) for n in operands)


def _shows_source(node: Node, is_source: Callable[[Node], bool], undecoded: Callable[[Node], Node]) -> bool:
    """Return whether a node shows a source, whole or in part, in another dtype or times a number."""
    node = undecoded(node)
    while not is_source(node):
        if not (is_view_or_cast(node) or node.target in _PARTS | ops.COPIES or _is_multiple(node)):
            return False
        node = undecoded(node.all_input_nodes[0])
    return True


def _is_multiple(node: Node) -> bool:
    return node.target in ops.PRODUCTS and len(node.all_input_nodes) == 1 and not is_square(node)


class _Chain:
    """A chain with sources of one standard deviation."""

    def __init__(self, node: Node, is_source: Callable[[Node], bool], undecoded: Callable[[Node], Node], scale: float):
        self.node, self.is_source, self.undecoded, self.scale = node, is_source, undecoded, scale
        self.random = torch.Generator("cpu").manual_seed(0)
        self.pairs: dict[Hashable, tuple[Tensor, Tensor]] = {}  # elements of a node, and those with rounded sources

    def amplification(self) -> float:
        try:
            with unset_fake_temporarily():
                exact, rounded = self._operator(self.node)
                error, size = float((rounded - exact).norm()), float(exact.norm())
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):  # it is not elementwise
            return float("inf")
        found = error / (size * _ERROR) if size else 0.0
        return found if found == found else float("inf")  # NaN

    def _pair(self, node: Node) -> tuple[Tensor, Tensor]:
        node = self.undecoded(node)
        shown = self._shown(node)
        key = (shown, str(node.args[1:])) if shown is not node else node  # parts have elements of their own
        if key not in self.pairs:
            is_leaf = self.is_source(shown) or not _is_elementwise(shown)
            self.pairs[key] = self._leaf(node, self.is_source(shown)) if is_leaf else self._operator(node)
        return self.pairs[key]

    def _shown(self, node: Node) -> Node:
        """Return the tensor of which a node shows a part, or the node itself."""
        while node.target in _PARTS:
            node = self.undecoded(node.all_input_nodes[0])
        return node

    def _leaf(self, node: Node, is_source: bool) -> tuple[Tensor, Tensor]:
        val = value(node)
        if val is None or not val.is_floating_point():
            elements = torch.randint(0, 2, (_ELEMENTS,), generator=self.random, device="cpu")
            elements = elements if val is None else elements.to(val.dtype)
            return elements, elements
        elements = torch.randn(_ELEMENTS, generator=self.random, dtype=torch.float32, device="cpu")
        if numel_hint(val) * STATISTIC <= numel_hint(tensor_of(self.node)):  # a statistic, or a norm's weight
            elements = 1 + elements / 8
            return elements, elements
        signs = 2 * torch.randint(0, 2, (_ELEMENTS,), generator=self.random, device="cpu") - 1
        elements = self.scale * elements
        return elements, elements * (1 + _ERROR * signs) if is_source else elements

    def _operator(self, node: Node) -> tuple[Tensor, Tensor]:
        if not _is_elementwise(node):
            raise ValueError(f"{node.target} is not elementwise")
        pairs = [self._pair(n) for n in node.all_input_nodes]
        if node.target in ops.VIEWS or node.target in ops.CASTS or node.target in ops.COPIES:
            return pairs[0]
        if node.target in ops.CONSTANTS:
            number = node.args[ops.CONSTANTS[node.target]]
            if not isinstance(number, int | float):
                raise TypeError(f"{node.target} has no constant")
            constant = torch.full((_ELEMENTS,), float(number), dtype=torch.float32, device="cpu")
            return constant, constant
        of = dict(zip(node.all_input_nodes, pairs, strict=True))
        exact, rounded = (self._called(node, {n: pair[i] for n, pair in of.items()}) for i in (0, 1))
        return exact, rounded

    def _called(self, node: Node, operands: dict[Node, Tensor]) -> Tensor:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        if result.shape != (_ELEMENTS,):
            raise ValueError(f"{node.target} is not elementwise")
        return result


def _is_elementwise(node: Node) -> bool:
    """Return whether a node is one of torch's own operators that loops compute, the same each time."""
    namespace = getattr(node.target, "namespace", "")
    return kind_of(node) in _LOOPS and can_repeat(node) and namespace in ("aten", "prims")
