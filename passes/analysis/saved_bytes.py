"""Count the bytes saved for backward: as predicted for a policy, and as partitioned.

Each storage that forward saves for backward counts once, with its full size. Inputs of the graph, parameters among
them, do not count, since they are in memory anyway. A parameter's stored copy counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import sympy
import torch
from torch.fx import Graph, Node

from fxprec.config.recipes import Recipe
from fxprec.ir.symbolic import (
    AS_STORED,
    DEQUANTIZE,
    PACK_BITS,
    QUANTIZE,
    TENSOR_SCALE,
    TRANSPOSED,
    Quantize,
    is_in_blocks,
)
from fxprec.kernels.host import WaitOffload
from fxprec.numerics.bits import BIT, IN_A_BYTE, Bit
from fxprec.numerics.blocks import AnyFormat, BlockFormat
from fxprec.numerics.formats import NAMED, Format
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.passes.analysis.joint import (
    JointGraph,
    bytes_of,
    input_index,
    is_backward,
    made_by,
    numel_expr,
    numel_hint,
    results_of,
    tensor_of,
    value,
)
from fxprec.passes.analysis.marks import marks
from fxprec.passes.analysis.operators import module_of, source_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.plan import ByteCount, Group, Plan, SavedTensor


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes saved for backward by tensor id, for high and for low tensors. Tensors not listed are not saved."""

    high: Mapping[int, int]
    low: Mapping[int, int]
    fixed: int = 0
    """Bytes that are saved whatever the policy chooses (masks, indices, statistics)."""

    @classmethod
    def predict(cls, tensors: Sequence[CountedTensor], recipe: Recipe) -> Self:
        """Predict the bytes of the tensors marked ``saved``: elements times the bytes of their format."""
        saved = [t for t in tensors if t.saved]
        high = {t.id: t.elements * bytes_per_element(recipe.format_of(t.kind, low=False)) for t in saved}
        low = {t.id: t.elements * bytes_per_element(recipe.format_of(t.kind, low=True)) for t in saved}
        return cls(high, low)

    def gain(self, tensor: int) -> int:
        """Return the bytes that demoting a tensor frees."""
        return self.high.get(tensor, 0) - self.low.get(tensor, 0)

    def total(self, low: Collection[int]) -> int:
        """Return all bytes saved if the tensors in ``low`` are low."""
        return self.fixed + sum(self.low[i] if i in low else size for i, size in self.high.items())


def predicted_size(tensors: Sequence[CountedTensor], recipe: Recipe, low: Collection[int]) -> sympy.Expr:
    """Return the bytes of the tensors marked ``saved`` as an expression in the dynamic dimensions."""
    saved = (t for t in tensors if t.saved)
    return sympy.Add(*(t.size * bytes_per_element(recipe.format_of(t.kind, low=t.id in low)) for t in saved))


def partitioned_size(forward: Graph, num_outputs: int) -> sympy.Expr:
    """Return the bytes that a partitioned forward half saves, as an expression in the dynamic dimensions."""
    vals = [value(node) for node in _saved_storages(forward, num_outputs)]
    return sympy.Add(*(numel_expr(val) * val.dtype.itemsize for val in vals if val is not None))


def read_by_backward(joint: JointGraph) -> int:
    """Return the bytes that backward reads of forward, without inputs: the bytes saved if nothing is recomputed."""
    read = (x for node in joint.graph.nodes if is_backward(node) for x in node.all_input_nodes if not is_backward(x))
    stored = (x.all_input_nodes[0] if x.target is DEQUANTIZE else x for x in map(_storage, read))
    storages = {x for x in map(_storage, stored) if x.op == "call_function" and value(x) is not None}
    return sum(bytes_of(tensor_of(x)) for x in storages)


def largest_saved(forward: Graph, num_outputs: int) -> tuple[Node, int] | None:
    """Return the largest storage that a partitioned forward half saves, with its bytes; None if it saves nothing."""
    sizes = {node: bytes_of(tensor_of(node)) for node in _saved_storages(forward, num_outputs)}
    return max(sizes.items(), key=lambda item: item[1]) if sizes else None


def bytes_per_element(fmt: Format) -> int:
    """Return the bytes of one stored code: 1, 2 or 4."""
    return 1 if fmt.bits <= 8 else 2 if fmt.bits <= 16 else 4


def stored_bytes(fmt: AnyFormat | Bit | None, val: torch.Tensor) -> int:
    """Return the bytes of a tensor's copy in ``fmt``, scales of blocks included; None: in the tensor's own dtype."""
    if isinstance(fmt, Bit):
        return numel_hint(val) // IN_A_BYTE
    if isinstance(fmt, BlockFormat):
        return fmt.num_bytes(numel_hint(val))
    return bytes_of(val) if fmt is None else numel_hint(val) * bytes_per_element(fmt)


def bytes_in_float32(tensors: Sequence[CountedTensor]) -> int:
    """Return the bytes of the tensors marked ``saved``, in float32."""
    return sum(4 * t.elements for t in tensors if t.saved)


def as_partitioned(plan: Plan, forward: Graph, num_outputs: int, inputs: Sequence[GraphInput]) -> tuple[Plan, int]:
    """Return the plan with the bytes that a partitioned forward half saves, and their total.

    The plan gets the bytes by tensor, by group and in all. The first ``num_outputs`` outputs are the model's own;
    backward reads the others.
    """
    joint = JointGraph(forward, inputs)
    on_host = {WaitOffload.of(node).x for node in WaitOffload.nodes(forward)}
    saved = tuple(
        replace(_saved_tensor(node, plan, joint), on_host=node in on_host)
        for node in _saved_storages(forward, num_outputs)
    )
    groups = tuple(_with_saved(group, [row for row in saved if row.group == group.id]) for group in plan.groups)
    total = ByteCount(
        fp32=sum(row.fp32 for row in saved),
        planned=sum(_on_device(row) for row in saved),
        fixed=sum(row.fp32 for row in saved if not row.elements),
    )
    return replace(plan, groups=groups, saved_bytes=total, saved=saved), total.planned


def _with_saved(group: Group, saved: Sequence[SavedTensor]) -> Group:
    elements = sum(row.elements for row in saved if row.fp32)
    return replace(group, saved_bytes=sum(map(_on_device, saved)), saved_elements=elements)


def _on_device(row: SavedTensor) -> int:
    return 0 if row.on_host else row.bytes


def _saved_tensor(node: Node, plan: Plan, joint: JointGraph) -> SavedTensor:
    """Return the plan's row of one storage."""
    cast, size, encoded = Quantize.match(node), bytes_of(tensor_of(node)), marks(node).encodes
    row = cast.row if cast is not None and cast.row > AS_STORED else encoded[0] if encoded is not None else None
    site = None if row is None else plan.sites[row]
    source = _copied(node)
    given = joint.describe(source) if source.op == "placeholder" else None
    elements = _elements(node) if _holds_floats(node) else 0
    is_parameter = given is not None and given.kind == "param"
    whole = bytes_of(tensor_of(source)) if node.target is PACK_BITS else size
    fp32 = 0 if is_parameter else 4 * elements if _holds_floats(node) else whole
    return SavedTensor(
        tensor=site.tensor if site is not None else source.name if given is None else given.name,
        module=site.module if site is not None else module_of(source) if given is None else given.module,
        source=site.source if site is not None else source_of(source),
        format=_format_of(node) if cast is None else cast.format,
        bytes=size,
        elements=elements,
        group=marks(node).group or 0 if site is None else site.group,
        site=None if site is None else site.id,
        fp32=fp32,
    )


def _format_of(node: Node) -> str:
    """Return the format of a storage that no cast wrote, ``bf16`` or ``bit``; a transposed copy has its codes'."""
    if node.target is PACK_BITS:
        return BIT.name
    if node.target is TRANSPOSED and (cast := Quantize.match(node.all_input_nodes[0])) is not None:
        return cast.format
    dtype = tensor_of(node).dtype
    return next((name for name, fmt in NAMED.items() if fmt.torch_dtype is dtype), str(dtype).removeprefix("torch."))


def copied_inputs(forward: Graph, num_outputs: int, inputs: Sequence[GraphInput]) -> tuple[int, ...]:
    """Return the positions of parameters and inputs that backward reads as a stored copy only."""
    joint = JointGraph(forward, inputs)
    sources = [_copied(node) for node in _saved_storages(forward, num_outputs)]
    placeholders = [n for n in sources if n.op == "placeholder" and joint.describe(n).kind in ("param", "input")]
    return tuple(sorted({index for n in placeholders if (index := input_index(n)) is not None}))


def _saved_storages(forward: Graph, num_outputs: int) -> Iterator[Node]:
    """Yield the node of each storage that is saved for backward, inputs left out."""
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


def _holds_floats(node: Node) -> bool:
    is_float = tensor_of(node).dtype.is_floating_point
    return is_float or node.target in (QUANTIZE, TRANSPOSED) or marks(node).encodes is not None


def _elements(node: Node) -> int:
    """Return the elements of the tensor that a storage has; a tensor's scale has none."""
    cast, encoded = Quantize.match(node), marks(node).encodes
    if encoded is not None:
        return encoded[1]
    if cast is not None and is_in_blocks(cast.format):
        return numel_hint(tensor_of(cast.x))
    return 0 if node.target is TENSOR_SCALE else numel_hint(tensor_of(node))


def _copied(node: Node) -> Node:
    while node.target in _COPIES:
        node = _storage(node.all_input_nodes[0])
    return node


_COPIES = (QUANTIZE, DEQUANTIZE, TRANSPOSED, CONVERT, PACK_BITS)
