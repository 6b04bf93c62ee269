"""Turn a GPU's 16-bit attention back to float32, so that the plan is made for the float32 tensors.

The driver gives a GPU's attention 16-bit operands before torch traces (`narrow_attention`), so that torch chooses a
faster kernel. Each 16-bit copy would be a tensor of its own in the plan: stored beside the float32 tensor that it came
from, in a layout that no GEMM reads. After the plan is made, narrow-gemms converts attention's operands again, where
their layout is best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import factors_of, input_at, item_of, readers, tensor_of, value
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.base import Pass, Work
from fxprec.passes.sites import replace_node


@dataclass(frozen=True)
class WidenAttention(Pass):
    """Remove conversions between float32 and a GPU's bfloat16 attention. narrow-gemms inserts them again."""

    name: str = "widen-attention"

    def apply(self, work: Work) -> None:
        if work.settings.recipe.hi.torch_dtype != torch.bfloat16:
            return  # narrow-gemms would not convert attention, or its backward, again
        for node in list(work.joint.graph.nodes):
            if node.target in ops.ATTENTION_ON_GPU:
                backward = list(_backward_of(node))
                calls = [_Call(n) for n in (node, *backward)]
                if all(call.is_between_float32 for call in calls):
                    for call in calls:
                        call.widen(work.joint.graph)


def _backward_of(attention: Node) -> Iterator[Node]:
    for result in attention.users:
        item = item_of(result)
        if item is not None and item[1] == 0:
            yield from (user for user in _readers(result) if user.target in ops.ATTENTION_BACKWARD)


def _readers(node: Node) -> Iterator[Node]:
    """Yield the readers of a tensor, through the aliases that autograd makes of saved tensors."""
    return (user for _, user in readers(node, lambda user: user.target in ops.ALIASES))


@dataclass(frozen=True)
class _Call:
    """One call of attention, forward or backward, in bfloat16."""

    node: Node

    @property
    def operands(self) -> list[Node]:
        """Return the tensors that attention multiplies; mask, statistics and forward result are left out."""
        return list(dict.fromkeys(factors_of(self.node)))

    @property
    def results(self) -> list[Node]:
        """Return attention's result tensors in bfloat16: the forward result, or the gradients of the operands."""
        return [user for user in self.node.users if _is_narrow(user)]

    @property
    def is_between_float32(self) -> bool:
        """Return whether all operands are converted from float32, and all results to float32."""
        return all(map(_was_float32, self.operands)) and all(
            user.target in ops.ATTENTION_BACKWARD or (user.target is CONVERT and user.args[1] == torch.float32)
            for result in self.results
            for user in _readers(result)
        )

    def widen(self, graph: Graph) -> None:
        for operand in self.operands:
            self.node.replace_input_with(operand, input_at(operand, 0))
            if not operand.users:
                graph.erase_node(operand)
        traced = self.node.meta["val"]
        assert isinstance(traced, tuple | list)
        results = {item[1]: user for user in self.results if (item := item_of(user)) is not None}
        self.node.meta["val"] = tuple(v.float() if i in results else v for i, v in enumerate(traced))
        for i, result in results.items():
            for shown in (result, *_aliases(result)):
                shown.meta["val"] = self.node.meta["val"][i]
            for user in [user for user in result.users if user.target is CONVERT]:
                replace_node(user, result)


def _aliases(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.target in ops.ALIASES:
            yield user
            yield from _aliases(user)


def _is_narrow(node: Node) -> bool:
    found = value(node)
    return found is not None and found.dtype == torch.bfloat16


def _was_float32(node: Node) -> bool:
    return node.target is CONVERT and _is_narrow(node) and tensor_of(input_at(node, 0)).dtype == torch.float32
