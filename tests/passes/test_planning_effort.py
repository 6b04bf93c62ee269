"""What planning a peak budget may take: counted in searches and nodes, so plans repeat and grow linearly in layers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from backend_helpers import eager_backend
from one_pass import run_pass
from torch import Tensor, nn

from fxprec import BudgetError, Plan
from fxprec.demo.models import CharTransformer
from fxprec.passes import choose_crossings
from fxprec.passes.analysis import sensitive
from fxprec.passes.analysis.replay.replay import Kept, Replay
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.budget_part import Bound
from fxprec.passes.crossings import choice, effort
from fxprec.passes.crossings import problem as problems
from fxprec.passes.crossings.choice import Chooser
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.effort import Effort
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.crossings.problem import Problem
from fxprec.passes.crossings.repeats import find_repeats, groups_of

TOKENS = torch.randint(0, 32, (4, 64), generator=torch.Generator().manual_seed(3))


def transformer(layers: int) -> CharTransformer:
    torch.manual_seed(0)
    return CharTransformer(vocab=32, context=64, layers=layers, heads=2, width=64)


class Seen(Exception):
    """Ends a compilation: what was to be planned is known."""


def chooser_for(layers: int) -> Chooser:
    found: list[Needs] = []

    def watch(work: Any, needs: Needs, *rest: Any) -> Any:
        found.append(needs)
        raise Seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_crossings, "within_budget", watch)
        backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="100%")
        with pytest.raises(Exception, match="Seen"):
            torch.compile(transformer(layers), backend=backend)(TOKENS)
    return Chooser(Problem(found[0], Rates.of(torch.device("cpu")), ("narrow", "recompute")))


def test_equal_blocks_are_found_whatever_stands_around_them() -> None:
    assert find_repeats([*"xyz", *"abcd" * 3, "w"]) == [(3, 4, 3)]
    assert find_repeats([*"abcdefgh"]) == []
    assert sorted(find_repeats([*"abcd" * 3, "x", *"efghi" * 2])) == [(0, 4, 3), (13, 5, 2)]


def test_blocks_that_follow_each_other_share_a_group() -> None:
    traits = [*"abcd" * 6]
    assert len(set(groups_of(24, traits, 4))) == 4
    halves = groups_of(24, traits, 8)
    assert halves == [*range(4)] * 3 + [*range(12, 16)] * 3
    assert groups_of(24, traits, 100) == list(range(24)), "where a search can see all blocks, none shares"


@pytest.mark.parametrize("share", [0.6, 0.45, 0.01], ids=["60 %", "45 %", "out of reach"])
def test_a_question_takes_no_more_than_its_effort(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    searched = problems.Problem._searched

    def watched(self: Any, constraints: Any, tied: Any, near: Any, gap: float) -> Any:
        sizes.extend([tied.shape[1]] if near is None else [])
        return searched(self, constraints, tied, near, gap)

    monkeypatch.setattr(problems.Problem, "_searched", watched)
    chooser = chooser_for(6)
    assert len(chooser.problem.columns) > 2 * problems._WIDE, "else the test shows little"
    found = chooser.within(Bound(share * chooser.unlimited.peak))
    assert (found is None) == (share == 0.01)
    assert max(sizes, default=0) <= 1.2 * problems._WIDE
    assert sum(sizes) <= effort._EFFORT
    assert chooser.problem.effort.nodes <= problems._SEARCHED * chooser.problem.effort.searches


def test_searches_do_not_grow_with_layers() -> None:
    widths = [chooser_for(layers).problem._tied.shape[1] for layers in (6, 12)]
    assert max(widths) <= 1.2 * problems._WIDE


def test_plans_repeat_bit_for_bit() -> None:
    def plan() -> Plan:
        torch._dynamo.reset()
        backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="60%")
        torch.compile(transformer(4), backend=backend)(TOKENS)
        return backend.plans[0]

    first, second = plan(), plan()
    assert (first.sites, first.peak_bytes) == (second.sites, second.peak_bytes)


def test_a_budget_out_of_reach_says_so_within_the_same_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, list[int]] = {"take_search": [], "take_replay": []}

    def watch(name: str) -> None:
        asked = getattr(Effort, name)

        def watched(self: Effort, size: int) -> bool:
            is_left: bool = asked(self, size)
            taken[name].extend([size] if is_left else [])
            return is_left

        monkeypatch.setattr(Effort, name, watched)

    watch("take_search")
    watch("take_replay")
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget=1000)
    with pytest.raises(BudgetError, match="the lowest peak found is"):
        torch.compile(transformer(4), backend=backend)(TOKENS)
    assert sum(taken["take_search"]) <= 3 * effort._EFFORT, "of everything kept, within the budget, and the least"
    assert 0 < sum(taken["take_replay"]) <= effort._REPLAYED, "within the budget and the least together"


def test_a_choice_that_lowers_nothing_is_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The searches for a budget, and for one that an error may name, come to the same choices."""
    chooser, replayed = chooser_for(2), list[int]()
    start = chooser.unlimited

    def replay(step: Step, kept: Kept) -> Replay:
        found = Replay(step, kept)
        replayed.append(found.peak)
        return found

    monkeypatch.setattr(choice, "Replay", replay)
    first, tried = chooser.lowered(start), len(replayed)
    replayed.clear()
    again = chooser.lowered(start)
    assert (again.peak, again.ways) == (first.peak, first.ways)
    assert len(replayed) < tried
    assert [start.peak, *replayed] == sorted({start.peak, *replayed}, reverse=True), "each lowers the peak"


def test_the_collector_is_kept_from_what_exists_already_unless_the_user_keeps_it_from_something() -> None:
    was_frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        with choose_crossings._known_objects_frozen():
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()
        gc.freeze()
        theirs, new = gc.get_freeze_count(), [[] for _ in range(100)]
        with choose_crossings._known_objects_frozen():
            assert gc.get_freeze_count() < theirs + len(new)
        assert gc.get_freeze_count()
    finally:
        gc.freeze() if was_frozen else gc.unfreeze()


class Doubling(torch.autograd.Function):
    """The identity. Backward computes a factor from the input, in steps that read each result twice: 2^16 paths."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        for _ in range(16):
            x = x + 0.5 * x
        return gradient * torch.exp(x)


class Doubled(nn.Module):
    """A doubling between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Doubling.apply(self.first(x)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo instantiates it
def test_planning_visits_a_value_once_however_many_paths_lead_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: list[Any] = []
    is_product = sensitive._is_product_of_values

    def watched(node: Any) -> bool:
        visited.append(node)
        return is_product(node)

    monkeypatch.setattr(sensitive, "_is_product_of_values", watched)
    found = run_pass("carry-scales", Doubled(), torch.randn(64, 8))
    assert 2 * 16 <= len(visited) < 4 * 16
    step = Step(found.work.joint)
    wanted = [list(step.wanted_by(node)) for node in step.backward]
    assert max(map(len, wanted)) > 0
    assert all(len(values) == len(set(values)) for values in wanted)
