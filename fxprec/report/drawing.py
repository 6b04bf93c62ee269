"""The drawing for ``report.html`` and the DOT file: the joint graph without casts, each node with group and sites."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch.fx import Node

from fxprec.errors import PlanError
from fxprec.ir.symbolic import QUANTIZE, Quantize
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.joint import factors_of, numel_hint, shape_text, value
from fxprec.passes.analysis.operators import module_of, source_of
from fxprec.passes.analysis.replay.kernels import flops_of
from fxprec.passes.base import Work
from fxprec.passes.pass_report import target_text
from fxprec.plan import Plan
from fxprec.plan.reading import Entry, finite

SCHEMA = 1
FILE = "graph.json"
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """One node of the joint graph."""

    name: str
    op: str
    backward: bool
    group: int
    module: str
    source: str
    value: str
    """``"float32 8 x 4"``, or ``""`` if the node's value is no tensor."""
    elements: int
    saved: bool
    """Whether the node is a counted forward tensor that backward reads."""
    sites: tuple[int, ...]
    """Sites of the plan that store this value; a gradient has a site for each value that it is the gradient of."""


@dataclass(frozen=True, slots=True)
class GemmCost:
    """Cost of one forward GEMM."""

    flops: int
    """Operations, two per multiply-add."""
    operands: tuple[tuple[int, int], ...]
    """For each operand, the position of its node in the drawing and the elements read."""
    result: int
    """Elements written."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """The nodes in execution order, and the edges as pairs of positions in ``nodes``."""

    nodes: tuple[DrawnNode, ...]
    edges: tuple[tuple[int, int], ...]
    gemms: tuple[GemmCost | None, ...]
    """The cost of each GEMM of the plan."""
    damage: tuple[float, ...] | None = None
    """Measured increase of the loss if a group is low, by group; only for policy ``exact``."""

    @classmethod
    def of(cls, work: Work) -> Drawing:
        """Draw a graph whose casts are inserted and whose plan is written."""
        return _Walk(work).run(work.plan)

    def save(self, path: Path) -> None:
        """Write one node per line; the same graph gives the same bytes. Raises OSError."""
        rows = ",\n".join(f"  {json.dumps([_plain(n, f.name) for f in fields(n)])}" for n in self.nodes)
        rest = {"edges": self.edges, "gemms": [g and asdict(g) for g in self.gemms], "damage": self.damage}
        tail = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in rest.items())
        path.write_text(f'{{\n "schema": {SCHEMA},\n "nodes": [\n{rows}\n ],\n{tail}\n}}\n', encoding="ascii")

    @classmethod
    def load(cls, path: Path, plan: Plan) -> Drawing | None:
        """Read a drawing of ``plan``; None if there is no file. Raises `PlanError` for a file that is not whole."""
        try:
            if not path.exists():
                return None
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"is larger than {MAX_BYTES // 2**20} MiB")
            return _checked(json.loads(path.read_text(encoding="ascii")), plan)
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
            cause = " ".join(str(error).split())[:120]
            raise PlanError(f"{path}: is not a graph that fxprec wrote ({cause}); dump the model again") from None


def _plain(node: DrawnNode, name: str) -> object:
    found = getattr(node, name)
    return int(found) if isinstance(found, bool) else found


class _Walk:
    """Removes the nodes that passes inserted: each stands for the value that it was made from."""

    def __init__(self, work: Work) -> None:
        self.work, self.grouped, self.operators = work, work.grouped, work.operators
        self.stands_for: dict[Node, Node] = {}
        self.sites: dict[Node, list[int]] = defaultdict(list)
        self.group_of: dict[Node, int] = {}

    def run(self, plan: Plan) -> Drawing:
        kept = [n for n in self.work.joint.graph.nodes if self._keeps(n)]
        index = {node: i for i, node in enumerate(kept)}
        self._note_uncast(index)
        edges = dict.fromkeys(
            (index[source], index[node])
            for node in kept
            for source in map(self._origin, node.all_input_nodes)
            if source in index
        )
        for node in kept:
            self.group_of[node] = self._group(node, plan)
        for node, i in index.items():  # an input belongs to the group that reads it first
            if node.op == "placeholder" and node not in self.grouped.values:
                readers = [self.group_of[u] for u in node.users if u in index]
                self.group_of[node] = min(readers, default=self.group_of[kept[max(i - 1, 0)]])
        gemms = {op.name: cost_of(op.nodes[0], index) for op in self.grouped.gemms}
        return Drawing(
            nodes=tuple(self._drawn(node) for node in kept),
            edges=tuple(edges),
            gemms=tuple(gemms.get(g.node) for g in plan.gemms),
            damage=self._damage(len(plan.groups)),
        )

    def _keeps(self, node: Node) -> bool:
        if node.op == "output" or node is self.work.joint.table:
            return False
        if getattr(node.target, "namespace", "") != "fxprec":
            return True
        self.stands_for[node] = self._origin(node.all_input_nodes[0])
        if node.target is QUANTIZE:
            self._note_site(node)
        return False

    def _note_site(self, cast: Node) -> None:
        book = self.work.book
        origin = self.stands_for[cast]
        further = {} if self.work.scales is None else self.work.scales.site_of
        row = Quantize.of(cast).row
        site = further.get(row, row)
        if not self.work.settings.is_simulated:  # a copy of the value minus its mean stands for the value
            origin = book.values.get(site, origin)
        if 0 <= site < len(book.sites) and site not in self.sites[origin]:
            self.sites[origin].append(site)

    def _note_uncast(self, drawn: Container[Node]) -> None:
        """Note the sites whose cast was removed because nothing else would read the copy (compute-high)."""
        noted = {site for sites in self.sites.values() for site in sites}
        for site, node in self.work.book.values.items():
            if site not in noted and node in drawn:
                self.sites[node].append(site)

    def _origin(self, node: Node) -> Node:
        return self.stands_for.get(node, node)

    def _group(self, node: Node, plan: Plan) -> int:
        if node in self.grouped.values:
            return self.grouped.values[node].group
        op = self.operators.of_node.get(node) or self.operators.of_backward_node.get(node)
        if op is not None:
            return self.grouped.group_of[op]
        if self.sites[node]:  # a sum of gradients
            return plan.sites[self.sites[node][0]].group
        known = [self.group_of[n] for n in map(self._origin, node.all_input_nodes) if n in self.group_of]
        return min(known, default=0)

    def _drawn(self, node: Node) -> DrawnNode:
        val, tensor = value(node), self.grouped.values.get(node)
        describe = node.op == "placeholder" and node not in self.work.joint.tangents
        given = self.work.joint.describe(node) if describe else None
        return DrawnNode(
            name=node.name if given is None else given.name,
            op=(given.kind if given else "tangent") if node.op == "placeholder" else target_text(node.target),
            backward=self.work.joint.in_backward(node),
            group=self.group_of[node],
            module=module_of(node) or (given.module if given else ""),
            source=source_of(node),
            value="" if val is None else f"{str(val.dtype).removeprefix('torch.')} {shape_text(val)}",
            elements=0 if val is None else numel_hint(val),
            saved=tensor is not None and tensor.saved,
            sites=tuple(self.sites[node]),
        )

    def _damage(self, groups: int) -> tuple[float, ...] | None:
        if self.work.damage is None:
            return None
        total = [0.0] * groups
        for tensor in self.grouped.tensors:
            total[tensor.group] += self.work.damage.get(tensor.id, 0.0)
        return tuple(total)


def cost_of(node: Node, index: Mapping[Node, int]) -> GemmCost:
    """Return the cost of a GEMM node. Its operands are looked up in ``index``, behind casts and views."""
    operands = []
    for factor in factors_of(node):
        val = value(factor)
        if val is not None:
            operands.append((index[_stored(factor, index)], numel_hint(val)))
    results = [n for n in (node, *node.users) if value(n) is not None]
    result = value(results[0]) if results else None
    return GemmCost(int(flops_of(node)), tuple(operands), 0 if result is None else numel_hint(result))


def _stored(node: Node, index: Mapping[Node, int]) -> Node:
    """Follow casts and views back to the node that made the value."""
    while (node.target in ops.VIEWS or node not in index) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _checked(data: Mapping[str, Any], plan: Plan) -> Drawing:
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {str(data['schema'])[:20]}, wanted {SCHEMA}")
    nodes = tuple(_node(row, plan) for row in data["nodes"])
    edges = tuple((_within(a, len(nodes)), _within(b, len(nodes))) for a, b in data["edges"])
    gemms = tuple(None if g is None else _cost(g, len(nodes)) for g in data["gemms"])
    damage = None if data["damage"] is None else tuple(finite(Entry(d)) for d in data["damage"])
    if len(gemms) != len(plan.gemms) or (damage is not None and len(damage) != len(plan.groups)):
        raise ValueError("belongs to another plan")
    return Drawing(nodes, edges, gemms, damage)


def _node(row: Sequence[Any], plan: Plan) -> DrawnNode:
    name, op, backward, group, module, source, shown, elements, saved, sites = row
    if not all(isinstance(text, str) for text in (name, op, module, source, shown)):
        raise ValueError("a node's name is not a string")
    found = tuple(_within(s, len(plan.sites)) for s in sites)
    place = _within(group, len(plan.groups))
    return DrawnNode(name, op, bool(backward), place, module, source, shown, _within(elements), bool(saved), found)


def _cost(row: Mapping[str, Any], nodes: int) -> GemmCost:
    operands = tuple((_within(i, nodes), _within(n)) for i, n in row["operands"])
    return GemmCost(flops=_within(row["flops"]), operands=operands, result=_within(row["result"]))


def _within(number: object, end: int = 2**63) -> int:
    if type(number) is not int or not 0 <= number < end:
        raise ValueError(f"{str(number)[:20]} is not a number below {end}")
    return number
