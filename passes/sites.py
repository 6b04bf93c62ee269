"""Sites and their nodes: one row of the plan for each tensor that is stored in a chosen format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.config.recipes import Recipe
from fxprec.errors import PlanError
from fxprec.ir.calls import Call
from fxprec.ir.operators import HighReason
from fxprec.ir.symbolic import AS_STORED, Dequantize, KeepNonfinite, Quantize, stored_dtype
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis.joint import is_backward, operator_of, tensor_of
from fxprec.passes.analysis.marks import mark_like
from fxprec.passes.analysis.ops import MUTATIONS
from fxprec.passes.analysis.regions import REGION_META
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.plan import Site
from fxprec.plan.compare import refuse_another_site

_BY_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_COPIED_META = ("seq_nr", "stack_trace", "nn_module_stack", "fwd_nn_module_stack")


def emit(
    graph: Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: Node,
    *,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    backward: bool | None = None,
    val: torch.Tensor | None = None,
) -> Node:
    """Insert a node at the graph's insertion point, with a fake value and the origin of ``like``.

    ``backward`` overrides which half of the joint graph the node belongs to. ``val`` is the node's fake value if the
    caller knows it; otherwise the operator runs on fake tensors.
    """
    node = graph.call_function(target, args, dict(kwargs))
    node.meta = {key: like.meta[key] for key in _COPIED_META if key in like.meta}
    mark_like(node, like)
    if val is None:
        fakes: Any = torch.fx.map_arg(args, lambda n: n.meta["val"])
        val = target(*fakes, **kwargs)
    node.meta["val"] = val
    backward = is_backward(like) if backward is None else backward
    if backward:
        node.meta["partitioner_tag"] = "is_backward"
        node.meta["autograd_backward"] = True
    else:
        node.meta["partitioner_tag"] = "is_forward"
        node.meta |= {key: like.meta[key] for key in REGION_META if key in like.meta}
    return node


def emit_on(
    graph: Graph,
    step: Node,
    x: Node,
    like: Node | None = None,
    *,
    backward: bool | None = None,
    val: torch.Tensor | None = None,
) -> Node:
    """Insert a node as `emit` does. It calls what ``step`` calls, with ``x`` as the first argument."""
    args = x, *step.args[1:]
    return emit(graph, operator_of(step), args, like or step, kwargs=step.kwargs, backward=backward, val=val)


def emit_call(
    graph: Graph, call: Call, like: Node, *, backward: bool | None = None, val: torch.Tensor | None = None
) -> Node:
    """Insert a call of one of fxprec's operators as `emit` does."""
    return emit(graph, call.target, call.args, like, backward=backward, val=val)


@dataclass
class SiteBook:
    """Opens one site for each counted tensor, and inserts the sites' quantize and dequantize nodes."""

    graph: Graph
    table: Node
    recipe: Recipe
    storage: str
    low: frozenset[int]  # ids of the low counted tensors
    given: Sequence[Site] | None = None  # the sites of a plan to follow: row for row the same tensors
    reasons_high: Mapping[int, HighReason] = field(default_factory=dict)  # by id, from `analysis.sensitive`
    guards_gradients: bool = False  # scaled gradients saturate, and keep the model's own inf and NaN
    multiplies_codes: bool = False  # GEMMs may multiply gradients' codes, which then need codes of inf and NaN
    sites: list[Site] = field(default_factory=list)
    values: dict[int, Node] = field(default_factory=dict)  # site id -> node of the value, stored low or not
    _by_tensor: dict[int, Site] = field(default_factory=dict)

    def _in_force(self, site: Site) -> Site:
        """Return a new row as the given plan has it. Raises `PlanError` if the plan has another tensor in this row."""
        promoted_at = None
        if self.given is not None:
            refuse_another_site(site.id, site, self.given)
            given = self.given[site.id]
            promoted_at = given.promoted_at
            is_settled = given.promoted_at is None and (
                given.is_unread or given.way in ("keep", "recompute", "offload")
            )
            if not (is_settled and given.format == self.recipe.hi.name):
                site = replace(site, format=given.format, why=site.why if given.format == site.format else "")
        fmt = parse(site.format)
        self._refuse_unstorable(site, fmt)
        return replace(site, format=self.guarded_format(site.kind, fmt).name, promoted_at=promoted_at)

    def guarded_format(self, kind: str, fmt: Format) -> Format:
        """Return ``fmt``, or its saturating variant if a gradient of this kind needs that."""
        if not self._is_guarded(kind, fmt):
            return fmt
        return _with_nan(fmt) if self.multiplies_codes and fmt.bits <= 8 else _saturating(fmt)

    def _refuse_unstorable(self, site: Site, fmt: Format) -> None:
        if self.storage == "native" and fmt.torch_dtype is None:
            raise PlanError(
                f"sites[{site.id}].format ({site.tensor}) of the given plan is {site.format!r}, which torch has no "
                "dtype for, and storage='native' needs one; give storage='packed' or storage='simulate', or choose "
                "e4m3fn, e5m2, bf16, fp16 or fp32"
            )

    def _is_guarded(self, kind: str, fmt: Format) -> bool:
        return self.guards_gradients and kind.startswith("grad") and not fmt.has_float32_range

    def _wanted(self, tensor: CountedTensor, dtype: torch.dtype) -> Format:
        reason = self.reasons_high.get(tensor.id)
        if reason is not None:
            return parse(_BY_DTYPE[dtype]) if reason.as_it_is else self.recipe.hi
        return self._assigned_format(tensor)

    def _assigned_format(self, tensor: CountedTensor) -> Format:
        return self.recipe.format_of(tensor.kind, low=tensor.id in self.low)

    def _why(self, tensor: CountedTensor, dtype: torch.dtype) -> str:
        """Return why a tensor is not in the format that its group or the policy gives it, or ``""``."""
        reason = self.reasons_high.get(tensor.id)
        return reason.why if reason is not None and self._wanted(tensor, dtype) != self._assigned_format(tensor) else ""

    def kept_high(self) -> Iterator[tuple[Site, HighReason]]:
        """Yield (site, reason) for each site that keeps more bits because 8 bits would spoil the tensor."""
        for tensor, reason in self.reasons_high.items():
            site = self._by_tensor.get(tensor)
            if site is not None:
                fmt = self.recipe.format_of(site.kind, low=tensor in self.low)
                if fmt.bits < parse(site.format).bits:
                    yield site, reason

    def site(self, tensor: CountedTensor, dtype: torch.dtype) -> Site:
        """Return the tensor's row, which the first call opens.

        The graph alone decides which tensors have rows, and in which order; formats have no part in it. So a promotion,
        an edited plan or another low ratio changes what a row says, never which tensor it describes. Raises `PlanError`
        if the given plan describes another tensor in this row.
        """
        found = self._by_tensor.get(tensor.id)
        if found is None:
            found = self._in_force(
                Site(
                    id=len(self.sites),
                    tensor=tensor.name,
                    kind=tensor.kind,
                    module=tensor.module,
                    source=tensor.source,
                    shape=tensor.shape,
                    elements=tensor.elements,
                    group=tensor.group,
                    format=self._wanted(tensor, dtype).name,
                    direction="backward" if tensor.kind.startswith("grad") else "forward",
                    why=self._why(tensor, dtype),
                )
            )
            self.sites.append(found)
            self._by_tensor[tensor.id] = found
        return found

    def is_identity(self, tensor: CountedTensor, dtype: torch.dtype) -> bool:
        """Return whether storing the tensor in its format changes neither bits nor memory. Its row stays anyway."""
        return parse(self.site(tensor, dtype).format).torch_dtype == dtype

    def store(self, node: Node, tensor: CountedTensor, *, backward: bool | None = None) -> tuple[Node, Node]:
        """Insert ``dequantize(quantize(node))`` at the insertion point; return the quantize and the node to read."""
        wide = tensor_of(node)
        site = self.site(tensor, wide.dtype)
        q, x = self.cast(node, site.id, parse(site.format), backward=backward)
        if self._is_guarded(tensor.kind, parse(site.format)):
            x = emit_call(self.graph, KeepNonfinite(x, node), node, backward=backward, val=wide)
        self.values[site.id] = node
        return q, x

    def cast(self, node: Node, row: int, fmt: Format, *, backward: bool | None = None) -> tuple[Node, Node]:
        """Insert a row's quantize and dequantize nodes at the insertion point; return both."""
        wide = tensor_of(node)
        narrow = torch.empty_like(wide, dtype=stored_dtype(fmt, self.storage))
        cast = Quantize(node, self.table, row, fmt.name, self.storage)
        q = emit_call(self.graph, cast, node, backward=backward, val=narrow)
        read = Dequantize(q, self.table, AS_STORED, fmt.name, self.storage, wide.dtype)
        return q, emit_call(self.graph, read, node, backward=backward, val=wide)

    def store_result(self, node: Node, tensor: CountedTensor, inside: Collection[Node]) -> None:
        """Store a value behind the node that computes it, for all readers but those ``inside`` its own operator."""
        sizes = [user for user in node.users if isinstance(user.meta.get("val"), torch.SymInt)]
        users = [user for user in node.users if user not in (*inside, *sizes) and user.target not in MUTATIONS]
        for size in sizes:
            _move_to_forward(size, node)
        with self.graph.inserting_before(insertion_point_after(node).next):
            q, x = self.store(node, tensor)
        replace_uses(node, x, [user for user in users if user is not q])

    def leave_high(self, row: int, why: str) -> None:
        """Record that a tensor has no stored copy; ``why`` is the reason if its row had a format below the high one."""
        site, hi = self.sites[row], self.recipe.hi
        high = replace(site, reads="all", format=hi.name)
        is_left = parse(site.format).bits < hi.bits
        self.sites[row] = replace(high, why=why, unread=True) if is_left else high


def _move_to_forward(size: Node, node: Node) -> None:
    """Let forward read a dynamic size of ``node`` that only backward needs: then a number is saved, and no tensor."""
    for tag in ("partitioner_tag", "autograd_backward"):
        size.meta.pop(tag, None)
    insertion_point_after(node).append(size)


def _saturating(fmt: Format) -> Format:
    return replace(fmt, overflow="saturate") if fmt.overflow == "inf" else fmt


def _with_nan(fmt: Format) -> Format:
    """Return the saturating format; if it has no code of NaN, its last code becomes one."""
    return replace(fmt, specials="fn", overflow="saturate") if fmt.nan_code is None else _saturating(fmt)


def set_format(fmt: Format, q: Node) -> None:
    """Change the format of a cast and of the nodes that read it back."""
    cast, val = Quantize.of(q), tensor_of(q)
    q.args = replace(cast, format=fmt.name).args
    q.meta["val"] = val.new_empty_strided(val.shape, val.stride(), dtype=stored_dtype(fmt, cast.storage))
    for x, call in Dequantize.among(q.users):
        x.args = replace(call, format=fmt.name).args


def read_of(q: Node) -> Node:
    """Return the node that readers of a cast read: its dequantize, or the guard behind it."""
    (read,) = [x for x, _ in Dequantize.among(q.users)]
    guards = [guard for guard, _ in KeepNonfinite.among(read.users)]
    return guards[0] if guards else read


def insertion_point_after(node: Node) -> Node:
    """Return the node behind which a cast of ``node`` may be inserted; for an input this is the last placeholder."""
    if node.op != "placeholder":
        return node
    while node.next.op == "placeholder":
        node = node.next
    return node


def replace_node(node: Node, new: Node) -> None:
    """Make all readers of ``node`` read ``new`` instead, and erase ``node``."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def replace_uses(node: Node, new: Node, users: Iterable[Node]) -> None:
    """Make ``users`` read ``new`` instead of ``node``."""
    for user in users:
        user.replace_input_with(node, new)
