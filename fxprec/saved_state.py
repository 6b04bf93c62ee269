"""The saved state of a backend: two fixed keys, whatever was compiled.

``torch.distributed.checkpoint`` loads into the keys that are there, and a fresh backend has no graphs yet. So the
states of all graphs are one text, which every way of saving takes: ``torch.save``, JSON, distributed checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fxprec.errors import PlanError

VERSION = 3
_READABLE = (2, VERSION)  # version 2 had a list of dicts in place of the text

GraphState = Mapping[str, Any]


def packed(graphs: Sequence[GraphState | None]) -> dict[str, Any]:
    """Return ``{"version": 3, "graphs": <JSON text>}`` from one state per graph, None where there is none yet."""
    return {"version": VERSION, "graphs": json.dumps(list(graphs))}


def unpacked(state: object) -> list[GraphState | None]:
    """Return one state per graph of what `packed` made, or of a state of version 2. Raises `PlanError` for others."""
    if not isinstance(state, Mapping) or state.get("version") not in _READABLE:
        raise PlanError(f"this is no state of fxprec.Backend version {VERSION}; pass what state_dict() returned")
    graphs = state.get("graphs")
    if isinstance(graphs, str):
        try:
            graphs = json.loads(graphs)
        except ValueError as error:
            raise PlanError(
                f"the saved state is damaged: its graphs are no JSON ({error}); pass what state_dict() returned"
            ) from error
    if not isinstance(graphs, list) or not all(g is None or isinstance(g, Mapping) for g in graphs):
        raise PlanError(
            "the saved state is damaged: its graphs are not a list of states; pass what state_dict() returned"
        )
    return graphs
