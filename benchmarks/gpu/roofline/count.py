"""One side of the table: captured, written as code, replayed, estimated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from benchmarks.gpu.absent import inductor_code, pretend
from benchmarks.gpu.roofline.estimate import GPUS, Half
from benchmarks.gpu.roofline.issue import Issue
from benchmarks.gpu.roofline.replay import NUM_OUTPUTS, Replay, replay
from benchmarks.gpu.roofline.sides import Halves, Network, Side, capture
from benchmarks.gpu.roofline.torchao_layers import call_scaled_products_as_they_are
from fxprec import compat
from fxprec.plan import Plan


@dataclass(frozen=True)
class Counted:
    """What one side's step does."""

    forward: Half
    backward: Half
    plan: Plan | None
    graphs: dict[str, str] = field(default_factory=dict)
    """By half, printed as lowered."""
    code: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def seconds_by_bytes(self) -> float:
        """Seconds if instructions took none."""
        return sum(cost.by_bytes for half in (self.forward, self.backward) for cost in half.costs)

    @property
    def launches(self) -> int:
        return len(self.forward.costs) + len(self.backward.costs)


def count(side: Side, network: Network, arch: int = 90) -> Counted:
    """Compile a step for a GPU of `GPUS` that is not there, and count what its code does."""
    halves, rates = capture(side, network, arch), GPUS[arch]
    graphs = {half: str(gm.graph) for half, gm in halves.graphs.items()}
    code, forward = _written(halves, side, arch)
    backward = replay(code["backward"], forward)
    counted = (
        Half.of(found, rates, Issue.of(code[half], arch))
        for half, found in (("forward", forward), ("backward", backward))
    )
    return Counted(*counted, halves.plan, graphs, code)


def written(side: Side, network: Network, arch: int) -> dict[str, str]:
    """Return Inductor's code of both halves."""
    return _written(capture(side, network, arch), side, arch)[0]


def _written(halves: Halves, side: Side, arch: int) -> tuple[dict[str, str], Replay]:
    code = {"forward": _code(halves, "forward", side, arch)}
    forward = replay(code["forward"])
    _take_saved(halves.graphs["backward"], forward.results)
    code["backward"] = _code(halves, "backward", side, arch)
    return code, forward


def _code(halves: Halves, half: str, side: Side, arch: int) -> str:
    loads = nullcontext() if side.options is None else compat.only_tensors_are_loads(half in halves.scaled)
    with pytest.MonkeyPatch.context() as patch, loads:
        pretend(patch, arch)
        if side.torchao is not None:
            call_scaled_products_as_they_are(patch)
        return inductor_code(halves.graphs[half], half)


def _take_saved(backward: GraphModule, results: Sequence[Any]) -> None:
    """Give backward's inputs the strides they get: Inductor chooses those of what forward saves, as AOTAutograd tells."""
    for node, saved in zip(backward.graph.find_nodes(op="placeholder"), results[NUM_OUTPUTS:], strict=False):
        val = node.meta["val"]
        if isinstance(val, torch.Tensor) and not node.name.startswith("tangents_") and val.stride() != saved.stride():
            with val.fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = val.new_empty_strided(val.shape, saved.stride())
