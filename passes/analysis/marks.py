"""What passes note of a node for later passes: one record, under one metadata key. All other keys are torch's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.fx import Node

if TYPE_CHECKING:
    from fxprec.passes.analysis.tensors import CountedTensor
    from fxprec.passes.lowering.blocks import BlockCall

_KEY = "fxprec"


@dataclass(frozen=True)
class Marks:
    """The notes of one node. A copy of the node's metadata has them all; a node that is emitted like it, `for_new`."""

    group: int | None = None
    """The group of the node's operator, for profiler ranges and saved bytes; from group-tensors."""
    operand_of: tuple[int, int] | None = None
    """The id of the plan's GEMM and the elements of its weight, for a cast of an operand; from block-gemms."""
    is_mask: bool = False
    """Whether the value contains mask fills; from `mark_values`, as the next two."""
    is_untouchable: bool = False
    """Whether no pass may change the value: a divisor, a root's operand, a result of log-softmax."""
    is_under_way: bool = False
    """Whether a collective has not delivered the value yet."""
    has_scaled_channels: bool = False
    """Whether this is a weight times smooth-swiglu's powers of two, which passes treat as a view of the weight."""
    encodes: tuple[int, int] | None = None
    """The site and the elements of the value that a form encoded in this tensor; no elements for a second tensor."""
    dumped: tuple[CountedTensor, ...] = ()
    """The tensors that ``dump_tensors`` names and whose value this is."""
    carried: int | None = None
    """The variable of the scale graph that scales such a value; from carry-scales."""
    origin: str = ""
    """The name that a kernel's text gives the value, if it is another node's; from the Triton lowering."""
    block_call: BlockCall | None = None
    """The cast that a kernel for blocks computes, a `BlockCall`; from the lowering of blocks."""

    def for_new(self) -> Marks:
        """Return what also holds of a node that is inserted for the same operator."""
        return Marks(group=self.group, operand_of=self.operand_of)


_NONE = Marks()


def marks(node: Node) -> Marks:
    """Return the notes of a node."""
    found: Marks = node.meta.get(_KEY, _NONE)
    return found


def mark(node: Node, **notes: Any) -> None:
    """Note something of a node, by the names of `Marks`."""
    node.meta[_KEY] = replace(marks(node), **notes)


def mark_like(node: Node, like: Node) -> None:
    """Give a node that is inserted for the same operator as ``like`` what holds of both."""
    if _KEY in like.meta:
        node.meta[_KEY] = marks(like).for_new()
