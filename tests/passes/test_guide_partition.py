"""Pass guide-partition: the stored copy is saved, what is read from it made again."""

from __future__ import annotations

import pytest
import torch
from helpers import leave_out
from one_pass import Ran, run_pass
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fxprec import compat
from fxprec.ir import symbolic
from fxprec.passes.analysis.joint import is_backward
from fxprec.passes.guide_partition import forget_order

NAME = "guide-partition"
STORING = symbolic.Storing.target
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def policies(ran: Ran, target: object) -> set[object]:
    return {n.meta.get("recompute") for n in ran.nodes(target) if not is_backward(n)}


def test_copies_are_saved_and_decoded_again() -> None:
    ran = run_pass(NAME, linears(), torch.randn(8, 16), storage="packed")
    assert policies(ran, symbolic.QUANTIZE) == {SAVE}
    assert policies(ran, symbolic.DEQUANTIZE) == {AGAIN}


def test_a_simulation_stores_nothing_to_save() -> None:
    ran = run_pass(NAME, linears(), torch.randn(8, 16), storage="simulate")
    assert policies(ran, symbolic.QUANTIZE) == policies(ran, symbolic.DEQUANTIZE) == {None}
    assert ran.is_unchanged()


def test_a_result_waits_for_the_copies_that_only_backward_reads() -> None:
    """AOTAutograd would store them in backward, from the wide values: nothing that forward returns needs them."""
    ran = run_pass(NAME, linears(), torch.randn(8, 16), storage="packed")
    (storing,) = ran.nodes(STORING)
    x, copies = storing.args
    assert set(copies) == {n for n in ran.nodes(symbolic.QUANTIZE) if not is_backward(n)}
    assert ran.work.joint.results[0] is storing
    forget_order(ran.graph)
    assert ran.work.joint.results[0] is x
    assert not ran.nodes(STORING)


class Checked(nn.Module):
    """`torch.linalg.inv` checks its result: a side effect, whose token comes out of forward before the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.inv(self.first(x))


@pytest.mark.skipif(compat.torch_version() < (2, 13), reason="torch 2.11 has no token for what linalg.inv checks")
def test_an_effect_token_waits_for_nothing() -> None:
    ran = run_pass(NAME, Checked(), torch.randn(8, 8), storage="packed")
    (storing,) = ran.nodes(STORING)
    token, result, *_ = ran.work.joint.results
    assert result is storing
    assert token.meta["val"].numel() == 0


def test_the_backward_half_is_not_marked() -> None:
    ran = run_pass(NAME, linears(), torch.randn(8, 16), storage="packed", recipe="fp16")
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


def test_a_copy_in_a_region_is_made_again_with_what_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where GEMMs multiply its codes: otherwise compute-high takes it away."""
    leave_out(monkeypatch, "compute-high")
    ran = run_pass(NAME, Region(), torch.randn(8, 16), storage="packed")
    assert policies(ran, symbolic.QUANTIZE) == {SAVE, AGAIN}
    (inside,) = (n for n in ran.nodes(symbolic.QUANTIZE) if n.args[0].name.startswith("mul") and not is_backward(n))
    assert inside.meta["recompute"] == AGAIN


def test_nothing_in_a_region_is_stored_but_what_it_starts_from() -> None:
    ran = run_pass(NAME, Region(), torch.randn(8, 16), storage="packed", recipe="hfp8")
    assert policies(ran, symbolic.QUANTIZE) == {SAVE}
    sites = [ran.work.book.sites[cast.row] for _, cast in symbolic.Quantize.among(ran.nodes(symbolic.QUANTIZE))]
    hi, lo = ran.work.settings.recipe.hi.name, ran.work.settings.recipe.lo_forward.name
    assert {s.tensor: (s.format, s.reads) for s in sites} == {
        "x": (lo, "backward"),
        "addmm": (hi, "all"),
        "tanh": (hi, "backward"),  # its gradient is 1 - y^2
    }


@pytest.mark.parametrize("storage", ["packed", "simulate"])
def test_what_has_no_backward_or_stores_nothing_is_left_alone(storage: str) -> None:
    with torch.set_grad_enabled(storage == "simulate"):
        ran = run_pass(NAME, linears(), torch.randn(8, 16), storage=storage)
    assert not any("recompute" in n.meta for n in ran.graph.nodes)
