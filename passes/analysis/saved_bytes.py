"""Count the bytes saved for backward: predicted for a policy, and as partitioned.

Each storage that the forward half hands to backward counts once and whole. The graph's inputs do not count, parameters
among them, since they are there anyway. A parameter's stored copy counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import sympy
import torch
from torch.fx import Graph, Node

from fxprec.config.recipes import Recipe
from fxprec.ir.symbolic import AS_STORED, DEQUANTIZE, QUANTIZE, TENSOR_SCALE, TRANSPOSED, Quantize, is_in_blocks
from fxprec.kernels.host import WaitOffload
from fxprec.numerics.blocks import AnyFormat, BlockFormat
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.passes.analysis.joint import (
    JointGraph,
    input_index,
    is_backward,
    made_by,
    numel_expr,
    numel_hint,
    results_of,
    tensor_of,
    value,
)
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.tensors import GROUP_META, CountedTensor
from fxprec.plan import ByteCount, Plan


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes saved for backward by tensor id, held high and held low. Tensors not listed are not saved."""

    high: Mapping[int, int]
    low: Mapping[int, int]
    fixed: int = 0
    """Bytes saved whatever is chosen (masks, indices, statistics)."""

    @classmethod
    def predict(cls, tensors: Sequence[CountedTensor], recipe: Recipe) -> Self:
        """Predict from the tensors marked ``saved``: elements times the bytes of their format."""
        saved = [t for t in tensors if t.saved]
        high = {t.id: t.elements * bytes_per_element(recipe.format_of(t.kind, low=False)) for t in saved}
        low = {t.id: t.elements * bytes_per_element(recipe.format_of(t.kind, low=True)) for t in saved}
        return cls(high, low)

    def gain(self, tensor: int) -> int:
        """Return the bytes that demoting a tensor frees."""
        return self.high.get(tensor, 0) - self.low.get(tensor, 0)

    def total(self, low: Collection[int]) -> int:
        """Return all bytes saved when the tensors in ``low`` are low."""
        return self.fixed + sum(self.low[i] if i in low else size for i, size in self.high.items())


def predicted_size(tensors: Sequence[CountedTensor], recipe: Recipe, low: Collection[int]) -> sympy.Expr:
    """Return the bytes of the tensors marked ``saved`` as an expression in the dynamic dimensions."""
    saved = (t for t in tensors if t.saved)
    return sympy.Add(*(t.size * bytes_per_element(recipe.format_of(t.kind, low=t.id in low)) for t in saved))


def partitioned_size(forward: Graph, num_outputs: int) -> sympy.Expr:
    """Return the bytes a partitioned forward half saves as an expression in the dynamic dimensions."""
    vals = [value(node) for node in _saved_storages(forward, num_outputs)]
    return sympy.Add(*(numel_expr(val) * val.dtype.itemsize for val in vals if val is not None))


def read_by_backward(joint: JointGraph) -> int:
    """Return the bytes of what backward reads of forward, inputs left out: saved where nothing is computed again."""
    read = (x for node in joint.graph.nodes if is_backward(node) for x in node.all_input_nodes if not is_backward(x))
    stored = (x.all_input_nodes[0] if x.target is DEQUANTIZE else x for x in map(_storage, read))
    storages = {x for x in map(_storage, stored) if x.op == "call_function" and value(x) is not None}
    return sum(_bytes(x) for x in storages)


def largest_saved(forward: Graph, num_outputs: int) -> tuple[Node, int] | None:
    """Return the largest storage that a partitioned forward half saves, with its bytes; None where it saves nothing."""
    sizes = {node: _bytes(node) for node in _saved_storages(forward, num_outputs)}
    return max(sizes.items(), key=lambda item: item[1]) if sizes else None


def _bytes(node: Node) -> int:
    return numel_hint(tensor_of(node)) * tensor_of(node).dtype.itemsize


def bytes_per_element(fmt: Format) -> int:
    """Return the bytes of one stored code: formats are held in 1, 2 or 4 bytes."""
    return 1 if fmt.bits <= 8 else 2 if fmt.bits <= 16 else 4


def stored_bytes(fmt: AnyFormat | None, val: torch.Tensor) -> int:
    """Return the bytes of a tensor's copy in a format, of blocks their scales included; None: in its own dtype."""
    if isinstance(fmt, BlockFormat):
        return fmt.num_bytes(numel_hint(val))
    return numel_hint(val) * (val.dtype.itemsize if fmt is None else bytes_per_element(fmt))


def bytes_in_float32(tensors: Sequence[CountedTensor]) -> int:
    """Return the bytes of the tensors marked ``saved``, in float32."""
    return sum(4 * t.elements for t in tensors if t.saved)


def as_partitioned(plan: Plan, forward: Graph, num_outputs: int, inputs: Sequence[GraphInput]) -> tuple[Plan, int]:
    """Return the plan with the bytes a partitioned forward half saves, in all and by group; and those in all.

    ``num_outputs`` of its outputs are the model's own, the others are for backward.
    """
    planned: dict[int, int] = defaultdict(int)
    elements: dict[int, int] = defaultdict(int)
    joint = JointGraph(forward, inputs)
    in_blocks = set[int]()  # rows
    others = 0  # bytes of masks, indices, seeds: float32 would save them too
    moved = {WaitOffload.of(node).x for node in WaitOffload.nodes(forward)}
    for node in _saved_storages(forward, num_outputs):
        val = tensor_of(node)
        group, count = _group(node, plan), numel_hint(val)
        planned[group] += 0 if node in moved else count * val.dtype.itemsize
        if not _holds_floats(node):
            others += count * val.dtype.itemsize
        elif not _is_copy_of_parameter(node, joint):
            elements[group] += _elements(node, in_blocks)
    groups = tuple(replace(g, saved_bytes=planned[g.id], saved_elements=elements[g.id]) for g in plan.groups)
    total = ByteCount(fp32=4 * sum(elements.values()) + others, planned=sum(planned.values()))
    return replace(plan, groups=groups, saved_bytes=total), total.planned


def copied_inputs(forward: Graph, num_outputs: int, inputs: Sequence[GraphInput]) -> tuple[int, ...]:
    """Return the positions of parameters and inputs that backward reads as a stored copy, and not themselves."""
    joint = JointGraph(forward, inputs)
    sources = [_copied(node) for node in _saved_storages(forward, num_outputs)]
    placeholders = [n for n in sources if n.op == "placeholder" and joint.describe(n).kind in ("param", "input")]
    return tuple(sorted({index for n in placeholders if (index := input_index(n)) is not None}))


def _saved_storages(forward: Graph, num_outputs: int) -> Iterator[Node]:
    """Yield the node that made each storage backward is handed, inputs left out."""
    saved = (n for n in results_of(forward)[num_outputs:] if isinstance(n, Node) and value(n) is not None)
    saved = (n if (call := WaitOffload.match(n)) is None else call.x for n in saved)
    yield from (n for n in dict.fromkeys(map(_storage, saved)) if n.op != "placeholder")


def _storage(node: Node) -> Node:
    """Follow views to the node whose memory they show."""
    while _is_view(made_by(node).target):
        node = made_by(node).all_input_nodes[0]
    return node


def _is_view(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [a.alias_info for a in target._schema.arguments if a.alias_info is not None]
    return bool(aliases) and not any(info.is_write for info in aliases)


def _group(node: Node, plan: Plan) -> int:
    cast = Quantize.match(node)
    if cast is not None and cast.row > AS_STORED:
        return plan.sites[cast.row].group
    return int(node.meta.get(GROUP_META, 0))


def _holds_floats(node: Node) -> bool:
    return tensor_of(node).dtype.is_floating_point or node.target in (QUANTIZE, TRANSPOSED)


def _elements(node: Node, in_blocks: set[int]) -> int:
    """Return the elements of the tensor that a storage holds: of blocks not their bytes, of a tensor's scale none.

    A tensor ``in_blocks`` counts once, though its signs may be stored beside it.
    """
    cast = Quantize.match(node)
    if cast is None or not is_in_blocks(cast.format):
        return 0 if node.target is TENSOR_SCALE else numel_hint(tensor_of(node))
    if cast.row in in_blocks:
        return 0
    in_blocks.add(cast.row)
    return numel_hint(tensor_of(cast.x))


def _is_copy_of_parameter(node: Node, joint: JointGraph) -> bool:
    source = _copied(node)
    return source.op == "placeholder" and joint.describe(source).kind == "param"


def _copied(node: Node) -> Node:
    while node.target in _COPIES:
        node = _storage(node.all_input_nodes[0])
    return node


_COPIES = (QUANTIZE, DEQUANTIZE, TRANSPOSED, CONVERT)
