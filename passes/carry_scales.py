"""Give every gradient a power-of-two scale of its own (Zhao et al. 2020).

Definitions: docs/algorithms.md, "Gradient scaling".

The pass walks the backward half in execution order. A gradient gets a scale where it is narrowed to its format: the
``quantize`` there multiplies by the new scale divided by the incoming one. Operators that are linear in the gradient
pass the scale on (`ops.TERMS`). Before scaled gradients are added, they are rescaled to one scale. Operators that are
unknown or not linear, and the code outside the graph, get unscaled gradients.

The pass chooses no exponents. Nodes refer to rows of the scale table, and `work.scales` describes to the runtime what
each row means.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from fxprec.ir.symbolic import DEQUANTIZE, KEEP_NONFINITE, Quantize, Rescale
from fxprec.numerics.formats import parse
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.constant_factors import constant_factors, growth_of
from fxprec.passes.analysis.dumped_tensors import dumped_in
from fxprec.passes.analysis.inputs import module_path
from fxprec.passes.analysis.joint import argument, input_at
from fxprec.passes.analysis.marks import mark
from fxprec.passes.analysis.producers import is_zero, producer_of
from fxprec.passes.analysis.values import is_float_tensor
from fxprec.passes.base import Pass, Work
from fxprec.passes.casts.fold_scales import fold_into_decodes
from fxprec.passes.sites import emit_call, insertion_point_after, replace_uses
from fxprec.passes.weigh_gemms import over_codes
from fxprec.plan.scales import Cast, Join, ScaleGraph, Slot

Scale = int | None  # index of a variable of the `ScaleGraph`, or None for a gradient without a scale


def needs_scale(fmt: str) -> bool:
    """Return whether a gradient in this format can need a scale."""
    return not parse(fmt).has_float32_range


@dataclass(frozen=True)
class CarryScales(Pass):
    """Fill ``work.scales``, and insert the nodes that multiply gradients by scales and divide by them."""

    name: str = "carry-scales"

    def apply(self, work: Work) -> None:
        if work.settings.grad_scaling is None or not work.joint.tangents:
            return
        walk = _Walk(work)
        if walk.is_needed():
            walk.run()
            work.scales = ScaleGraph(tuple(walk.variables), (*walk.before.slots, *walk.slots.values()))
            for node, _ in dumped_in(work.joint.graph):
                mark(node, carried=walk.carried.get(node))


@dataclass
class _Walk:
    work: Work
    variables: list[Cast | Join] = field(default_factory=list)
    slots: dict[tuple[Scale, Scale], Slot] = field(default_factory=dict)
    carried: dict[Node, int] = field(default_factory=dict)  # scaled node -> variable
    zeros: set[Node] = field(default_factory=set)  # gradients that are 0 everywhere: they agree with any scale
    casts: dict[Node, int] = field(default_factory=dict)  # quantize node -> its row
    rescaled: dict[tuple[Node, Scale], Node] = field(default_factory=dict)
    unknown: dict[str, Node] = field(default_factory=dict)
    factors: Mapping[Node, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.book = self.work.book
        self.graph = self.work.joint.graph
        self.before = self.work.scales or ScaleGraph()
        self.next_row = self.before.num_rows(len(self.book.sites))
        self.leaving = _leaving(self.graph.nodes)

    def is_needed(self) -> bool:
        casts = (cast for _, cast in Quantize.among(Quantize.nodes(self.graph)))
        return any(self.book.sites[c.row].direction == "backward" and needs_scale(c.format) for c in casts)

    def run(self) -> None:
        self.factors = constant_factors(self.graph)
        for node in list(self.graph.nodes):
            if node.op == "call_function":  # forward nodes too: a custom function's backward is not marked as backward
                self._visit(node)
        self._unscale(self.work.joint.output)
        unscaled = [n for (_, to), n in self.rescaled.items() if to is None]
        fold_into_decodes(self.graph, unscaled, self._inverse_row, over_codes(self.work))
        for target, node in self.unknown.items():
            module = module_path((list((node.meta.get("fwd_nn_module_stack") or {}).values()) or [("", "")])[-1][0])
            where = f" ({module})" if module else ""
            self.work.remarks.append(f"{target}{where} gets unscaled gradients: fxprec does not list it as linear")

    def _visit(self, node: Node) -> None:
        cast = Quantize.match(node)
        if cast is not None:
            self._cast(node, cast)
        elif node.target in (DEQUANTIZE, KEEP_NONFINITE, operator.getitem):
            self._pass_on(node, input_at(node, 0))
        elif any(n in self.carried or n in self.zeros for n in node.all_input_nodes):
            self._compute(node)

    def _pass_on(self, node: Node, source: Node) -> None:
        if source in self.carried:
            self.carried[node] = self.carried[source]
        if source in self.zeros:
            self.zeros.add(node)

    def _cast(self, q: Node, cast: Quantize) -> None:
        """Give a cast a scale; a cast to a format with float32's range keeps the incoming scale."""
        x, site, fmt = cast.x, cast.row, cast.format
        if self.book.sites[site].direction != "backward" or not needs_scale(fmt):
            self._pass_on(q, x)
            return
        row = site
        if site in self.casts.values():  # another consumer's contribution to the same gradient
            row = self._new_row()
            q.args = replace(cast, row=row).args
        producer, gemm = producer_of(x, self.work.operators, self.casts)
        self.casts[q] = row
        if x in self.zeros:
            self.zeros.add(q)
        growth = growth_of(x, is_param=self.book.sites[site].kind == "grad_param")
        factor = round(self.factors.get(x, 0.0) + growth)
        self.carried[q] = self._new(Cast(row, site, fmt, self.carried.get(x), producer, gemm, factor))

    def _compute(self, node: Node) -> None:
        if isinstance(node.meta.get("val"), torch.Tensor) and not is_float_tensor(node):
            self._unscale(node)  # complex, sparse and integer tensors carry no scale
            return
        terms = ops.TERMS.get(node.target)
        if terms is None or not _pads_with_zero(node):
            self._unscale(node)
            self.unknown.setdefault(str(node.target), node)
            return
        if node in self.leaving and node.target in ops.PASSING:
            self._unscale(node)
            return
        self._unscale(node, keep=_factors(node, terms, self.carried))
        parts = _parts(node, terms, self.carried, self.zeros)
        if parts is None:  # a term cannot be scaled
            self._unscale(node)
            return
        if not parts:
            self.zeros.add(node)
            return
        scales = {self.carried.get(n) for n in parts}
        if len(scales) == 1:
            common = scales.pop()
        else:
            common = self._new(Join(tuple(sorted(scales, key=lambda s: -1 if s is None else s))))
            for n in parts:
                self._rescale_input(node, n, common)
        if common is not None and any(n in self.carried for n in node.all_input_nodes):
            self.carried[node] = common

    def _unscale(self, node: Node, keep: Iterable[Node] = ()) -> None:
        """Take the scale off ``node``'s inputs, except off those in ``keep``."""
        kept = set(keep)
        for n in node.all_input_nodes:
            if n in self.carried and n not in kept:
                self._rescale_input(node, n, None)

    def _rescale_input(self, node: Node, n: Node, to: Scale) -> None:
        if self.carried.get(n) != to:
            replace_uses(n, self._rescale(n, to), [node])

    def _rescale(self, n: Node, to: Scale) -> Node:
        found = self.rescaled.get((n, to))
        if found is None:
            slot = self._slot(to, self.carried.get(n))
            with self.graph.inserting_before(insertion_point_after(n).next):
                rescale = Rescale(n, self.book.table, slot.row)
                found = emit_call(self.graph, rescale, n, backward=True, val=n.meta["val"])
            self.rescaled[n, to] = found
            if to is not None:
                self.carried[found] = to
        return found

    def _slot(self, plus: Scale, minus: Scale) -> Slot:
        found = self.slots.get((plus, minus))
        if found is None:
            found = self.slots[plus, minus] = Slot(self._new_row(), plus, minus)
        return found

    def _inverse_row(self, rescale: Node) -> int:
        return self._slot(self.carried[Rescale.of(rescale).g], None).row

    def _new(self, variable: Cast | Join) -> int:
        self.variables.append(variable)
        return len(self.variables) - 1

    def _new_row(self) -> int:
        self.next_row += 1
        return self.next_row - 1


def _leaving(nodes: Iterable[Node]) -> set[Node]:
    """Return the backward nodes whose users all lead out of the graph through nothing but `ops.PASSING`."""
    found: set[Node] = set()
    for node in reversed(list(nodes)):
        if node.users and all(u.op == "output" or (u in found and u.target in ops.PASSING) for u in node.users):
            found.add(node)
    return found


def _pads_with_zero(node: Node) -> bool:
    return node.target is not ops.aten.constant_pad_nd.default or argument(node, 2, 0) == 0


def _arguments(arg: object) -> list[object]:
    return list(arg) if isinstance(arg, list | tuple) else [arg]


def _factors(node: Node, terms: ops.Terms, carried: dict[Node, int]) -> list[Node]:
    """Return the inputs that may stay scaled: all addends, and the first scaled factor of each product."""
    kept: list[Node] = []
    elsewhere: set[Node] = set()
    for position, arg in enumerate(node.args):
        if not any(position in term for term in terms):
            elsewhere.update(n for n in _arguments(arg) if isinstance(n, Node))
    for term in terms:
        factors = [node.args[p] for p in term if p < len(node.args)]
        if len(term) == 1:
            kept += [n for n in _arguments(factors[0] if factors else None) if isinstance(n, Node)]
        else:
            scaled = [n for n in factors if isinstance(n, Node) and n in carried]
            kept += [n for n in scaled[:1] if scaled.count(n) == 1]  # a square is not linear
    return [n for n in kept if n not in elsewhere]


def _parts(node: Node, terms: ops.Terms, carried: Container[Node], zeros: Container[Node]) -> list[Node] | None:
    """Return the input of each term that carries the term's scale; terms that are 0 are left out.

    None if a term has no scale and cannot get one: a number or an integer tensor.
    """

    def vanishes(arg: object) -> bool:
        return arg in zeros or is_zero(arg)

    parts: list[Node] = []
    for term in terms:
        factors = [arg for p in term for arg in _arguments(argument(node, p)) if arg is not None]
        if len(term) > 1:
            nodes = [arg for arg in factors if isinstance(arg, Node)]
            if not any(vanishes(arg) for arg in factors):
                parts.append(next((n for n in nodes if n in carried), nodes[0]))
            continue
        for arg in factors:
            if vanishes(arg):
                continue
            if not isinstance(arg, Node) or not is_float_tensor(arg):
                return None
            parts.append(arg)
    return parts
