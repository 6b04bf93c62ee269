"""The drawing as a Graphviz file: groups are clusters, nodes are coloured by the width of their format."""

from __future__ import annotations

from collections.abc import Iterator

from fxprec.numerics.blocks import find
from fxprec.plan import Plan
from fxprec.report.drawing import Drawing, DrawnNode

# Fill colours by the largest number of bits, as in report.html.
_FILLS = ((8, "#dcebf8"), (16, "#fdf0d2"), (32, "#f9ddd2"))
_NO_FORMAT = "#eef0f3"


def dot_text(plan: Plan, drawing: Drawing, title: str) -> str:
    """Return the graph in the DOT language, which ``dot -Tsvg`` draws; the same graph gives the same bytes."""
    return "\n".join([f"digraph {_quoted(title)} {{", *_lines(plan, drawing), "}"]) + "\n"


def _lines(plan: Plan, drawing: Drawing) -> Iterator[str]:
    yield ' node [shape=box, style=filled, fontname="sans-serif", fontsize=10];'
    by_group: dict[int, list[int]] = {}
    for i, node in enumerate(drawing.nodes):
        by_group.setdefault(node.group, []).append(i)
    for group in plan.groups:
        yield f" subgraph cluster_{group.id} {{"
        yield f"  label={_quoted(f'group {group.id}: ' + ('low' if group.low else 'high'))};"
        for i in by_group.get(group.id, ()):
            yield f"  n{i} [{_attributes(plan, drawing.nodes[i])}];"
        yield " }"
    for a, b in drawing.edges:
        crosses = drawing.nodes[a].backward != drawing.nodes[b].backward
        yield f" n{a} -> n{b}{' [style=dashed]' if crosses else ''};"


def _attributes(plan: Plan, node: DrawnNode) -> str:
    formats = [plan.sites[s].stored_as for s in node.sites]
    label = _quoted("\n".join(filter(None, (node.name, node.op, node.value, *dict.fromkeys(formats)))))
    tip = _quoted(", ".join(filter(None, (node.module, node.source))) or node.op)
    return f'label={label}, tooltip={tip}, fillcolor="{_fill(formats)}"'


def _fill(formats: list[str]) -> str:
    if not formats:
        return _NO_FORMAT
    bits = find(formats[0]).bits
    return next((fill for most, fill in _FILLS if bits <= most), _NO_FORMAT)


def _quoted(text: str) -> str:
    """Quote a text for DOT: escape backslashes, quotation marks and new lines."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + "".join(c if c.isprintable() else " " for c in escaped) + '"'
