"""Group tensors between adjacent GEMMs, and mark every node with its group."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.passes.analysis.groups import GROUP_META, group_tensors
from fxprec.passes.base import Work


@dataclass(frozen=True)
class GroupTensors:
    """Fill ``work.grouped``."""

    name: str = "group-tensors"

    def apply(self, work: Work) -> None:
        assert work.operators is not None
        work.grouped = group_tensors(work.operators)
        for op, group in work.grouped.group_of.items():
            for node in (*op.nodes, *op.backward):
                node.meta[GROUP_META] = group
