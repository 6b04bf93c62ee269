"""Scale the channels between SwiGLU and the down projection by powers of two (Smooth-SwiGLU, arXiv 2409.12517).

Where the weights of gate and up projection align, one channel of silu(g) * u is hundreds of times as large as others.
Such a channel overflows in e4m3fn, or dominates the scale that it shares with others. The pass multiplies the channel
by 2^-k, and by 2^k that channel of the down projection's weight and of the weight's gradient. Powers of two are exact,
so that without rounding nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import input_at, is_backward, is_view_or_cast, tensor_of
from fxprec.passes.analysis.marks import mark
from fxprec.passes.base import Pass, Work
from fxprec.passes.notice import Notice
from fxprec.passes.sites import emit, replace_uses

aten = ops.aten
SLACK = 2
"""Binades that a channel may lie above the median channel. Larger channels are scaled down to this bound."""
MOST = 14
"""The largest k: weights of 0.02 times 2^14 are below e4m3fn's largest number."""


@dataclass(frozen=True)
class SmoothSwiGLU(Pass):
    """Scale the channels of each silu(g) * u that only linear layers read, if the recipe asks for it."""

    name: str = "smooth-swiglu"

    def apply(self, work: Work) -> None:
        if not work.settings.recipe.smooth_swiglu:
            return
        found = [pattern for node in list(work.joint.forward_nodes()) if (pattern := _Pattern.at(node))]
        for pattern in found:
            pattern.scale()
        names = ", ".join(pattern.product.name for pattern in found)
        if found:
            work.remarks.append(f"smooth-swiglu: channels far above the median are scaled by powers of two: {names}")
        else:
            detail = "recipe.smooth_swiglu finds no silu(g) * u here that linear layers alone read; nothing is scaled"
            work.notices.append(Notice("smooth-swiglu", detail))


@dataclass(frozen=True)
class _Pattern:
    """A product silu(g) * u, (.., channels), and the GEMMs that read it."""

    product: Node
    layers: tuple[tuple[Node, int], ...]
    """Forward GEMMs, each with the position of its weight, (.., channels, out), among the arguments."""
    gradients: tuple[tuple[Node, bool], ...]
    """GEMMs that compute weights' gradients, each with whether the channels are the result's last dimension."""

    @classmethod
    def at(cls, node: Node) -> _Pattern | None:
        """Return the pattern whose product is ``node``, or None."""
        is_product = node.target is aten.mul.Tensor and tensor_of(node).ndim > 1
        if not is_product or not any(map(_is_silu, node.all_input_nodes)):
            return None
        layers, gradients = [], []
        for gemm, shown, is_transposed in _readers(node, False):
            first, second = ops.GEMM_OPERANDS.get(gemm.target, (0, 0))
            is_first = input_at(gemm, first) is shown
            if first == second or input_at(gemm, second) is shown is input_at(gemm, first):
                return None
            if is_backward(gemm) and is_first == is_transposed:
                gradients.append((gemm, not is_first))
            elif not is_backward(gemm) and is_first and not is_transposed:
                layers.append((gemm, second))
            else:
                return None
        return cls(node, tuple(layers), tuple(gradients)) if layers else None

    def scale(self) -> None:
        """Multiply the product by 2^-k, and the weights that multiply it and their gradients by 2^k."""
        x = self.product
        # The unscaled product becomes an inner node of the scaling operator, so that nothing rounds or stores it.
        x.meta["original_aten"] = aten.mul.Scalar
        k = self._scale_product(_Writer(x, x.next, aten.mul.Scalar))
        for gemm, position in self.layers:
            # The scaled weight counts as a view of the weight, and not as one of the GEMM's own nodes.
            weight, write = input_at(gemm, position), _Writer(gemm, gemm, aten.permute.default, in_operator=False)
            column = write(aten.unsqueeze.default, write.power(k, 1, tensor_of(weight).dtype), -1)
            scaled = write(aten.mul.Tensor, weight, column)
            mark(scaled, has_scaled_channels=True)
            gemm.update_arg(position, scaled)
        for gemm, is_last in self.gradients:
            users, write = list(gemm.users), _Writer(gemm, gemm.next, aten.mul.Scalar)
            factor = write.power(k, 1, tensor_of(gemm).dtype)
            factor = factor if is_last else write(aten.unsqueeze.default, factor, -1)
            replace_uses(gemm, write(aten.mul.Tensor, gemm, factor), users)

    def _scale_product(self, write: _Writer) -> Node:
        """Scale the product; return each channel's k, (channels,) int32: its binades above the median plus `SLACK`."""
        x, users = self.product, list(self.product.users)
        val = tensor_of(x)
        top = write(aten.amax.default, write(aten.abs.default, x), list(range(val.ndim - 1)))
        bits = write(aten.view.dtype, write.converted(top, torch.float32), torch.int32)
        binade = write(aten.bitwise_right_shift.Tensor_Scalar, bits, 23)
        beyond = write(aten.sub.Tensor, binade, write(aten.median.default, binade))
        k = write(aten.clamp_min.default, write(aten.sub.Tensor, beyond, SLACK), 0)
        k = write(aten.clamp_max.default, k, MOST)
        replace_uses(x, write(aten.mul.Tensor, x, write.power(k, -1, val.dtype)), users)
        return k


@dataclass(frozen=True)
class _Writer:
    """Inserts nodes before ``before`` as nodes of one operator."""

    like: Node
    before: Node
    of: object
    """The operator that the nodes belong to, their ``original_aten``."""
    in_operator: bool = True
    """Whether the nodes keep the ``seq_nr`` of ``like``. False: they belong to no operator that the model called."""

    def __call__(self, target: Callable[..., Any], *args: object) -> Node:
        graph = self.like.graph
        with graph.inserting_before(self.before):
            node = emit(graph, target, args, self.like)
        node.meta["original_aten"] = self.of
        if not self.in_operator:
            node.meta.pop("seq_nr", None)
        return node

    def power(self, k: Node, sign: int, dtype: torch.dtype) -> Node:
        """Return 2^k, or 2^-k if ``sign`` is negative; both are exact."""
        field = self(aten.add.Tensor, k if sign > 0 else self(aten.neg.default, k), 127)
        bits = self(aten.bitwise_left_shift.Tensor_Scalar, field, 23)
        return self.converted(self(aten.view.dtype, bits, torch.float32), dtype)

    def converted(self, x: Node, dtype: torch.dtype) -> Node:
        """Return ``x`` in ``dtype``."""
        return x if tensor_of(x).dtype == dtype else self(ops.CONVERT, x, dtype)


def _is_silu(node: Node) -> bool:
    while is_view_or_cast(node) and "silu" not in str(node.meta.get("original_aten")):
        node = node.all_input_nodes[0]
    return str(node.meta.get("original_aten")).startswith("aten.silu.")


def _readers(node: Node, is_transposed: bool) -> Iterator[tuple[Node, Node, bool]]:
    """Yield (reader, what it reads, whether the channels are the first of two dimensions), through views and casts."""
    channels = tensor_of(node).shape[0 if is_transposed else -1]
    for user in node.users:
        sizes = list(tensor_of(user).shape) if is_view_or_cast(user) else []
        keeps_channels = user.target is aten.view.default and not is_transposed and sizes[-1] == channels
        if user.target in ops.CASTS or keeps_channels:
            yield from _readers(user, is_transposed)
        elif user.target in (aten.permute.default, aten.t.default) and len(sizes) == 2:
            yield from _readers(user, not is_transposed)
        else:
            yield user, node, is_transposed
