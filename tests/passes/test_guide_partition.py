"""Pass guide-partition: the stored copy is saved, what is read from it made again."""

from __future__ import annotations

import pytest
import torch
from one_pass import Ran, run_pass
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fxprec.ir import symbolic
from fxprec.passes.analysis.joint import is_backward

NAME = "guide-partition"
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def policies(ran: Ran, target: object) -> set[object]:
    return {n.meta.get("recompute") for n in ran.nodes(target) if not is_backward(n)}


def test_copies_are_saved_and_decoded_again() -> None:
    ran = run_pass(NAME, linears(), torch.randn(8, 16), storage="packed")
    assert policies(ran, symbolic.QUANTIZE) == {SAVE}
    assert policies(ran, symbolic.DEQUANTIZE) == {AGAIN}
    assert ran.is_unchanged(), "marks only"


def test_the_backward_half_is_not_marked() -> None:
    ran = run_pass(NAME, linears(), torch.randn(8, 16), storage="packed")
    assert ran.halves(symbolic.QUANTIZE)[1], "gradients are stored too"
    assert not any("recompute" in n.meta for n in ran.graph.nodes if is_backward(n))


def test_under_a_memory_budget_the_partitioner_chooses_among_copies() -> None:
    def budget(work: object) -> None:
        work.memory_budget = 0.5

    ran = run_pass(NAME, linears(), torch.randn(8, 16), storage="packed", prepare=budget)
    assert CheckpointPolicy.PREFER_SAVE in policies(ran, symbolic.QUANTIZE)
    assert SAVE not in policies(ran, symbolic.QUANTIZE)


class Region(nn.Module):
    """Two layers, recomputed, between two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=False).tanh())


def test_a_copy_in_a_region_is_made_again_with_what_it_copies() -> None:
    ran = run_pass(NAME, Region(), torch.randn(8, 16), storage="packed")
    assert policies(ran, symbolic.QUANTIZE) == {SAVE, AGAIN}
    (inside,) = (n for n in ran.nodes(symbolic.QUANTIZE) if n.args[0].name.startswith("mul") and not is_backward(n))
    assert inside.meta["recompute"] == AGAIN


@pytest.mark.parametrize("storage", ["packed", "simulate"])
def test_what_has_no_backward_or_stores_nothing_is_left_alone(storage: str) -> None:
    with torch.set_grad_enabled(storage == "simulate"):
        ran = run_pass(NAME, linears(), torch.randn(8, 16), storage=storage)
    assert not any("recompute" in n.meta for n in ran.graph.nodes)
