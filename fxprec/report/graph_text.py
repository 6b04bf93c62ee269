"""One joint graph as text: a line per node; the same graph gives the same bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from fxprec.ir.symbolic import AS_STORED, Dequantize, Quantize, is_in_blocks
from fxprec.passes.analysis.joint import shape_text, value
from fxprec.passes.analysis.operators import module_of, source_of
from fxprec.passes.base import Work
from fxprec.passes.pass_report import target_text
from fxprec.plan.lines import one_line


def graph_text(work: Work, title: str, changed: Mapping[str, tuple[int, int]]) -> str:
    """Return the graph under a title and the operator counts in ``changed`` (before, after).

    A node's line has the half (``f`` or ``b``), name, operator and arguments, dtype and shape. After ``#`` follow the
    group, the site (also the row of the scale table), the format, the readers if not all read it, the module and the
    source line. The line has only what the passes know yet.
    """
    head = [f"# {title}", f"# {len(work.joint.graph.nodes)} nodes"]
    head += [f"# {name}: {before} -> {after}" for name, (before, after) in changed.items()]
    return "\n".join([*head, "", *(_line(node, work) for node in work.joint.graph.nodes)]) + "\n"


def _line(node: Node, work: Work) -> str:
    half = "b" if work.joint.in_backward(node) else "f"
    notes = ", ".join(_notes(node, work))
    made = f"{half} {node.name} = {_call(node)}{_typed(node)}"
    return made + (f"  # {one_line(notes)}" if notes else "")


def _call(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        return f"output({', '.join(map(_shown, node.args))})"
    given = [_shown(a) for a in node.args] + [f"{k}={_shown(v)}" for k, v in node.kwargs.items()]
    target = node.target if isinstance(node.target, str) else target_text(node.target)
    return f"{target}({', '.join(given)})"


def _shown(value: object) -> str:
    """Write an argument without addresses or anything else that changes from run to run."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Node):
        return f"%{value.name}"
    if value is None or isinstance(value, str | bool | int | float):
        return repr(value)
    known = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat)
    return str(value) if isinstance(value, known) else type(value).__name__


def _typed(node: Node) -> str:
    val = value(node)
    return "" if val is None else f" : {str(val.dtype).removeprefix('torch.')} {shape_text(val)}"


def _notes(node: Node, work: Work) -> list[str]:
    notes = []
    if node.op == "placeholder" and node not in work.joint.tangents:
        described = work.joint.describe(node)
        notes.append(f"{described.kind} {described.name}")
    if work.has("grouped") and node in work.grouped.values:
        notes.append(f"group {work.grouped.values[node].group}")
    cast = Quantize.match(node) or Dequantize.match(node)
    if cast is not None:
        is_site = work.has("book") and 0 <= cast.row < len(work.book.sites)
        place = "" if cast.row == AS_STORED else f"{'site' if is_site else 'row'} {cast.row} "
        reads = work.book.sites[cast.row].reads if is_site and not is_in_blocks(cast.format) else "all"
        notes += [place + cast.format] + ([f"reads {reads}"] if reads != "all" else [])
    module, source = module_of(node), source_of(node)
    return notes + ([f"module {module}"] if module else []) + ([source] if source else [])
