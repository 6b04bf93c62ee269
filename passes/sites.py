"""Sites: one row of the plan per tensor that is stored in a chosen format, and the nodes that do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from fxprec.config.recipes import Recipe
from fxprec.errors import PlanError
from fxprec.ir.calls import Call
from fxprec.ir.operators import Kept
from fxprec.ir.symbolic import AS_STORED, Dequantize, KeepNonfinite, Quantize, stored_dtype
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis.joint import is_backward, operator_of, tensor_of
from fxprec.passes.analysis.regions import REGION_META
from fxprec.passes.analysis.tensors import GROUP_META, CountedTensor
from fxprec.plan import Site
from fxprec.plan.compare import refuse_another_site

_BY_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_COPIED_META = ("seq_nr", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", GROUP_META)


def emit(
    graph: Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: Node,
    *,
    backward: bool | None = None,
    val: torch.Tensor | None = None,
) -> Node:
    """Append a node at the graph's insertion point, with a fake value and ``like``'s origin.

    ``backward`` overrides which half of the joint graph the node belongs to; ``val`` is its fake value where the
    caller knows it, which saves running the op on fake tensors.
    """
    node = graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in _COPIED_META if key in like.meta}
    if val is None:
        fakes: Any = torch.fx.map_arg(args, lambda n: n.meta["val"])
        val = target(*fakes)
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
    """`emit`, of what ``step`` calls, with ``x`` in place of its first argument."""
    target, args = operator_of(step), (x, *step.args[1:])
    if val is None:
        fakes: Any = torch.fx.map_arg(args, lambda n: n.meta["val"])
        val = target(*fakes, **step.kwargs)
    node = emit(graph, target, args, like or step, backward=backward, val=val)
    node.kwargs = dict(step.kwargs)
    return node


def emit_call(
    graph: Graph, call: Call, like: Node, *, backward: bool | None = None, val: torch.Tensor | None = None
) -> Node:
    """`emit`, of an operator of ours."""
    return emit(graph, call.target, call.args, like, backward=backward, val=val)


@dataclass
class SiteBook:
    """Hands out one site per counted tensor and writes its quantize/dequantize nodes."""

    graph: Graph
    table: Node
    recipe: Recipe
    storage: str
    low: frozenset[int]  # ids of the counted tensors held low
    given: Sequence[Site] | None = None  # the sites of a plan to follow: row for row the same tensors
    kept: Mapping[int, Kept] = field(default_factory=dict)  # what 8 bits would spoil, by id (`analysis.sensitive`)
    guards_gradients: bool = False  # gradients saturate where they are scaled, and keep the model's own inf and NaN
    multiplies_codes: bool = False  # GEMMs may multiply the codes of gradients, and hand on inf and NaN in them
    sites: list[Site] = field(default_factory=list)
    values: dict[int, Node] = field(default_factory=dict)  # site id -> what it stores, or would store
    _by_tensor: dict[int, Site] = field(default_factory=dict)

    def _in_force(self, site: Site) -> Site:
        """Return the row that is opened next as the given plan has it. Raises `PlanError` if it has another there."""
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
        return replace(site, format=self.stored_as(site.kind, fmt).name, promoted_at=promoted_at)

    def stored_as(self, kind: str, fmt: Format) -> Format:
        """Return the format itself, or the one that saturates where a gradient needs it."""
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
        kept = self.kept.get(tensor.id)
        if kept is not None:
            return parse(_BY_DTYPE[dtype]) if kept.as_it_is else self.recipe.hi
        return self._unless_kept(tensor)

    def _unless_kept(self, tensor: CountedTensor) -> Format:
        return self.recipe.format_of(tensor.kind, low=tensor.id in self.low)

    def _why(self, tensor: CountedTensor, dtype: torch.dtype) -> str:
        """Return why a tensor is not in the format that its group, or the policy, gives it."""
        kept = self.kept.get(tensor.id)
        return kept.why if kept is not None and self._wanted(tensor, dtype) != self._unless_kept(tensor) else ""

    def spared(self) -> Iterator[tuple[Site, Kept]]:
        """Yield the sites that would have fewer bits but for what 8 bits would spoil, with the reason."""
        for tensor, kept in self.kept.items():
            site = self._by_tensor.get(tensor)
            if site is not None:
                fmt = self.recipe.format_of(site.kind, low=tensor in self.low)
                if fmt.bits < parse(site.format).bits:
                    yield site, kept

    def site(self, tensor: CountedTensor, dtype: torch.dtype) -> Site:
        """Return the tensor's row, opening it at first use.

        Which tensors have rows, and in which order, depends on the graph alone and on no format: a promotion, an
        edit or another low ratio changes what a row says, never which tensor it speaks of. Raises `PlanError` where
        the given plan speaks of another.
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
        """Say whether storing the tensor in its format changes neither bits nor memory; its row stays all the same."""
        return parse(self.site(tensor, dtype).format).torch_dtype == dtype

    def store(self, node: Node, tensor: CountedTensor, *, backward: bool | None = None) -> tuple[Node, Node]:
        """Insert ``dequantize(quantize(node))`` at the insertion point; return the stored and the read value."""
        wide: torch.Tensor = node.meta["val"]
        site = self.site(tensor, wide.dtype)
        narrow = torch.empty_like(wide, dtype=stored_dtype(parse(site.format), self.storage))
        cast = Quantize(node, self.table, site.id, site.format, self.storage)
        q = emit_call(self.graph, cast, node, backward=backward, val=narrow)
        read = Dequantize(q, self.table, AS_STORED, site.format, self.storage, wide.dtype)
        x = emit_call(self.graph, read, node, backward=backward, val=wide)
        if self._is_guarded(tensor.kind, parse(site.format)):
            x = emit_call(self.graph, KeepNonfinite(x, node), node, backward=backward, val=wide)
        self.values[site.id] = node
        return q, x


def _saturating(fmt: Format) -> Format:
    return replace(fmt, overflow="saturate") if fmt.overflow == "inf" else fmt


def _with_nan(fmt: Format) -> Format:
    """Return the saturating format, its last code spared for NaN where it has none."""
    return replace(fmt, specials="fn", overflow="saturate") if fmt.nan_code is None else _saturating(fmt)


def store_as(fmt: Format, q: Node) -> None:
    """Change the format of a cast, and of what reads it back."""
    cast, val = Quantize.of(q), tensor_of(q)
    q.args = replace(cast, format=fmt.name).args
    q.meta["val"] = val.new_empty_strided(val.shape, val.stride(), dtype=stored_dtype(fmt, cast.storage))
    for x, call in Dequantize.among(q.users):
        x.args = replace(call, format=fmt.name).args


def read_of(q: Node) -> Node:
    """Return what readers of a cast see: its dequantize, guarded or not."""
    (read,) = [x for x, _ in Dequantize.among(q.users)]
    guards = [guard for guard, _ in KeepNonfinite.among(read.users)]
    return guards[0] if guards else read


def insertion_point_after(node: Node) -> Node:
    """Return the node after which a cast of ``node`` may stand (after all placeholders for an input)."""
    if node.op != "placeholder":
        return node
    while node.next.op == "placeholder":
        node = node.next
    return node


def replace_uses(node: Node, new: Node, users: Iterable[Node]) -> None:
    """Make ``users`` read ``new`` where they read ``node``."""
    for user in users:
        user.replace_input_with(node, new)
