"""The choice of what is kept: all choices there are, closed forms, random rivals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from backend_helpers import eager_backend
from models import Apply
from torch import nn
from torch.fx import Node

from fxprec.passes import choose_crossings
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.analysis.ops import CASTS
from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.ways import FROM_EXACT, FROM_ROUNDED, Form, Recompute, Way
from fxprec.passes.budget_part import Bound
from fxprec.passes.crossings import choice
from fxprec.passes.crossings.best_of import BestOf
from fxprec.passes.crossings.choice import Chooser
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.curve import curve
from fxprec.passes.crossings.moments import Fit, Moments
from fxprec.passes.crossings.nearby import Nearby
from fxprec.passes.crossings.problem import Problem, Ways
from fxprec.passes.forms.blocks import Blocks
from fxprec.passes.forms.host import OnHost
from fxprec.passes.forms.low import Low
from fxprec.passes.forms.own import Own

aten = torch.ops.aten


def chooser_of(model: nn.Module, x: torch.Tensor, **options: Any) -> Chooser:
    """Return what chooses for a network in fp8."""
    found: list[Chooser] = []
    solved = choose_crossings.within_budget

    def watch(work: Any, needs: Any, *rest: Any) -> tuple[Fit, Any]:
        problem = Problem(needs, Rates.of(torch.device("cpu")), ("narrow", "recompute"))
        found.append(Chooser(problem))
        return solved(work, needs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_crossings, "within_budget", watch)
        given = {"recipe": "fp8", "low_ratio": None, **options}
        backend = eager_backend("native", peak_budget="100%", **given)
        torch.compile(model, backend=backend)(x)
    return found[0]


@pytest.fixture(scope="module")
def chooser() -> Chooser:
    torch.manual_seed(0)
    block = [nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
    return chooser_of(nn.Sequential(*block, *block), torch.randn(512, 64, requires_grad=True))


def completed(problem: Problem, kept: dict[Node, Way]) -> dict[Node, Way] | None:
    """Return a choice that keeps ``kept`` and computes all else again that is needed; None where it cannot."""
    high, low, ways = set(problem.needs.read_high), set(problem.needs.read_low), dict(kept)
    sources = {FROM_EXACT: high, FROM_ROUNDED: low}
    of_others: set[Node] = set()  # what is computed again asks for
    for node in reversed(problem.nodes):
        way = kept.get(node)
        if way is None and node in high | low:
            way = ways[node] = FROM_EXACT if node in high else FROM_ROUNDED
            sources[way] |= problem.sources(node)
            of_others |= problem.sources(node)
        is_low = isinstance(way.form if isinstance(way, OnHost) else way, Low)
        is_wrong = (is_low and node in high) or (isinstance(way, Blocks) and node in of_others)
        if is_wrong or (way is not None and (node, way) not in problem.columns):
            return None
    return ways


def least_times(found: Chooser, within: Callable[[Bound], Fit | None]) -> list[Fit]:
    """Return what is chosen within four budgets, after comparing it with every choice there is."""
    problem = found.problem
    sited = [node for node in problem.nodes if node in problem.needs.rows]
    ways = [[None, *(way for node, way in problem.columns if node is n and isinstance(way, Form))] for n in sited]
    picks = [{n: w for n, w in zip(sited, picked, strict=True) if w is not None} for picked in product(*ways)]
    fits = [found.replayed(choice) for kept in picks if (choice := completed(problem, kept)) is not None]
    assert len(fits) > 20
    least, chosen = min(fit.peak for fit in fits), list[Fit]()
    for share in (0.25, 0.5, 0.75, 1.0):  # at the least peak itself the search may end with nothing
        budget = int(least + share * (found.unlimited.peak - least))
        fit = within(Bound(budget))
        assert fit is not None
        assert fit.peak <= budget
        assert fit.seconds <= 1.001 * min(rival.seconds for rival in fits if rival.peak <= budget)
        chosen.append(fit)
    return chosen


def test_of_all_choices_with_block_formats_it_finds_the_one_of_least_time() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    found = chooser_of(model, torch.randn(1024, 64), ways=("narrow", "int4", "int2", "recompute"))
    slow = Rates(bytes_per_s=1e10, flop_per_s=1e9)  # to compute a GEMM again is no way out
    best_of = BestOf.of(found.problem.needs, slow, ("narrow", "recompute"))
    assert best_of.blocks is not None
    found, problem = best_of.blocks, best_of.blocks.problem
    offered = {tuple(f.format.name for f in forms if isinstance(f, Blocks)) for forms in problem.needs.forms.values()}
    assert offered == {(), ("int4", "int2")}
    fits = least_times(found, best_of.within)
    assert any(isinstance(way, Blocks) for fit in fits for way in fit.ways.values())


def test_of_all_choices_with_host_memory_it_finds_the_one_of_least_time() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    needs = chooser_of(model, torch.randn(2048, 64)).problem.needs
    slow = Rates(bytes_per_s=1e10, flop_per_s=1e9, host_bytes_per_s=1e9)
    found = Chooser(Problem(needs, slow, ("narrow", "recompute", "offload")))
    problem, fits = found.problem, least_times(found, found.within)
    assert any(way.is_on_host for fit in fits for way in fit.ways.values())
    fit = fits[-1]
    out = {n: OnHost(way) for n, way in fit.ways.items() if isinstance(way, Own)}
    moved = found.replayed({**fit.ways, **{n: way for n, way in out.items() if (n, way) in problem.columns}})
    assert moved.waiting < fit.waiting, "what is in host memory does not wait on the device"


def test_no_value_kept_at_the_least_peak_could_go_another_way(chooser: Chooser) -> None:
    best = chooser.lowered(chooser.unlimited)
    assert best.peak < 0.8 * chooser.unlimited.peak
    live, kept = best.replay.timeline.live, {node: way for node, way in best.ways.items() if isinstance(way, Form)}
    at_peak = [node for node in kept if best.replay.lives(node, live.index(max(live)), recomputed=False)]
    without = [{node: way for node, way in kept.items() if node is not left} for left in at_peak]
    low = [kept | {n: way} for n, way in chooser.problem.columns if n in at_peak and isinstance(way, Low)]
    rivals = [ways for tried in (*without, *low) if (ways := chooser.problem.completed(tried)) is not None]
    assert rivals
    assert all(chooser.replayed(ways).peak >= best.peak for ways in rivals)
    tried = [best.ways, *rivals, *chooser._neighbours(chooser.unlimited)]
    assert len(tried) > 10
    assert all(obeys(chooser.problem, ways) for ways in tried)


def obeys(problem: Problem, ways: Ways) -> bool:
    """Return whether a choice is one that the solver might find."""
    chosen = {problem.columns[key] for key in ways.items()}
    sums = (sum(weight for c, weight in row.items() if c in chosen) for row, _, _ in problem.rows)
    return all(least <= total <= most for total, (_, least, most) in zip(sums, problem.rows, strict=True))


def test_steps_lead_to_a_lower_peak_and_to_less_time(chooser: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the choice without a budget down to a bound; and from any choice within it to one that takes less time."""
    highest = chooser.unlimited
    least = chooser.lowered(highest)
    bound = Bound((highest.peak + least.peak) // 2)
    found = chooser.reached(highest, bound)
    assert found.excess(bound) <= 0
    for start in (found, least):
        faster = chooser.improved(start, bound)
        assert faster.excess(bound) <= 0
        assert faster.seconds <= start.seconds
        assert obeys(chooser.problem, faster.ways)
    assert chooser.improved(least, bound).seconds < least.seconds
    monkeypatch.setattr(chooser, "approach", lambda *_, **__: [least])
    found_within = chooser.within(bound)
    assert found_within is not None
    assert found_within.seconds < least.seconds
    monkeypatch.setattr(choice, "_CHANGES", 4)
    monkeypatch.setattr(choice, "_MOST_CHANGES", 4)
    far = chooser.improved(highest, bound)
    changed = [node for node in far.ways.keys() | highest.ways.keys() if far.ways.get(node) != highest.ways.get(node)]
    assert len(changed) > 4, "one step after the other"


def test_no_steps_are_taken_to_a_bound_far_below_what_is_found(
    chooser: Chooser, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(chooser, "reached", lambda fit, bound: asked.append(bound.peak / fit.peak) or fit)
    least = chooser.lowered(chooser.unlimited)
    monkeypatch.setattr(chooser, "approach", lambda *_, **__: [least])
    for share in (0.5, 0.65, 0.75, 0.9):
        assert chooser.within(Bound(share * least.peak)) is None
    assert asked == [pytest.approx(0.75), pytest.approx(0.9)]


def test_what_a_way_would_hold_is_mostly_what_it_holds(chooser: Chooser) -> None:
    moments, fit = Moments(chooser.problem), chooser.lowered(chooser.unlimited)
    errors = list[float]()
    for time, item in enumerate(fit.replay.timeline.order):
        estimated = moments._would_hold(fit.replay.anchors[item])
        for node, way in fit.ways.items():
            held = fit.replay.live_bytes(node, time, recomputed=not isinstance(way, Form))
            errors.append(estimated[chooser.problem.columns[node, way]] - held)
    assert sum(error != 0 for error in errors) < 0.08 * len(errors)


def test_a_step_changes_no_more_values_than_it_may(chooser: Chooser) -> None:
    ways = chooser.unlimited.ways
    rows = [moment.row(Bound(0)) for moment in Moments(chooser.problem).above(chooser.unlimited, Bound(0))]
    changed = []
    for most in (1, 2, 4, 8, 16, 32):
        found = Nearby(chooser.problem, ways, most).best(rows, chooser.unlimited.peak)
        if found is not None:  # where the solver's fractions do not round to a choice, there is none
            lost = [node for node, way in ways.items() if found.get(node) != way]
            changed.append(len(lost) + len(found.keys() - ways.keys()))
            assert changed[-1] <= most
    assert max(changed) > 2


def test_where_the_solver_finds_nothing_one_value_after_the_other_is_let_go(
    chooser: Chooser, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Bound(0.8 * chooser.unlimited.peak)
    monkeypatch.setattr(chooser.problem, "solve", lambda bounds, gap: None)
    found = chooser.within(budget)
    assert found is not None
    assert found.excess(budget) <= 0


def test_where_the_solver_finds_nothing_it_begins_from_the_choice_without_a_budget(
    chooser: Chooser, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = chooser.lowered(chooser.unlimited)
    begun = Chooser(chooser.problem, lower.ways)
    monkeypatch.setattr(chooser.problem, "solve", lambda bounds, gap=0.0: None if bounds else chooser.unlimited.ways)
    monkeypatch.setattr(begun, "lowered", lambda fit, enough=0.0: fit)
    monkeypatch.setattr(begun, "improved", lambda fit, bound: fit)
    assert begun.within(Bound(lower.peak - 1)) is None
    for found in (begun.within(Bound(lower.peak)), begun.least()):
        assert found is not None
        assert found.ways == lower.ways
    assert curve([begun])[-1].peak == lower.peak


def test_block_formats_never_make_a_choice_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the search among more ways finds: here nothing but what holds most."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    needs = chooser_of(model, torch.randn(1024, 64), ways=("narrow", "int4", "recompute")).problem.needs
    best_of = BestOf.of(needs, Rates(bytes_per_s=1e10, flop_per_s=1e9), ("narrow", "recompute"))
    plain = Chooser(best_of.plain.problem)
    least = plain.least()
    assert best_of.least().peak < least.peak, "4 bits are fewer than 8"
    assert best_of.blocks is not None
    monkeypatch.setattr(best_of.blocks.problem, "solve", lambda bounds, gap: None)
    budget = Bound(least.peak + (plain.unlimited.peak - least.peak) / 4)
    found, wanted = best_of.within(budget), plain.within(budget)
    assert found is not None
    assert wanted is not None
    assert found.excess(budget) <= 0
    assert found.seconds <= wanted.seconds
    monkeypatch.setattr(best_of.blocks, "narrowed", lambda fit: fit)
    monkeypatch.setattr(best_of.blocks, "lowered", lambda fit, enough=0.0: fit)
    assert best_of.least().peak <= least.peak


def test_equal_conversions_of_what_is_recomputed_are_one() -> None:
    """A GEMM reads the recomputed ReLU in bfloat16, and so does the mask of the ReLU's gradient."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64))
    found = chooser_of(model, torch.randn(512, 64), recipe="bf16")
    values = [node for node in found.problem.nodes if node.target is not aten.relu.default]
    ways = found.problem.completed({node: way for node, way in found.unlimited.ways.items() if node in values})
    assert ways is not None
    replay = found.replayed(ways).replay
    again = [i for i in range(replay.border, len(replay.items)) if replay.made[i].target is aten.relu.default]
    assert again, "it is recomputed"
    made = [tensor_of(replay.made[i]).dtype for i, item in enumerate(replay.items) if set(item.reads) & set(again)]
    assert made.count(torch.bfloat16) == 1


def test_what_is_converted_for_a_gemm_and_kept_in_that_dtype_is_one(chooser: Chooser) -> None:
    replay = chooser.replayed({node: way for node, way in chooser.problem.columns if isinstance(way, Own)}).replay
    copied = {node for node, form in replay.kept.items() if form.format is not None}
    kept = [n for n in replay.at if n.target in CASTS and n.all_input_nodes[0] in copied]
    assert {n for n in kept if replay.items[replay.at[n]].kind is Kind.VIEW}


def test_less_memory_never_takes_less_time(chooser: Chooser) -> None:
    most = chooser.unlimited
    fits = [chooser.within(Bound(int(most.peak * share))) for share in (1.0, 0.9, 0.8, 0.7)]
    seconds = [fit.seconds for fit in fits if fit is not None]
    assert len(seconds) == 4
    assert seconds == sorted(seconds)
    assert [fit.peak <= most.peak * share for fit, share in zip(fits, (1.0, 0.9, 0.8, 0.7), strict=True) if fit] == [
        True
    ] * 4
    assert chooser.within(Bound(1000)) is None
    assert chooser.least().peak < 0.7 * most.peak


def test_no_choice_made_under_other_costs_is_better(chooser: Chooser) -> None:
    budget = int(chooser.unlimited.peak * 0.7)
    found, own = chooser.within(Bound(budget)), chooser.problem.cost
    assert found is not None
    random = np.random.default_rng(1)
    rivals = []
    for _ in range(10):
        chooser.problem.cost = own * random.lognormal(0, 2, len(own))
        try:
            rival = chooser.within(Bound(budget))
        finally:
            chooser.problem.cost = own
        if rival is not None:
            rivals.append(chooser.replayed(rival.ways))
    assert len({rival.seconds for rival in rivals}) > 5, "else the test shows little"
    assert all(rival.peak <= budget for rival in rivals)
    assert found.seconds <= 1.02 * min(rival.seconds for rival in rivals)


def test_what_follows_a_relu_is_computed_again_from_its_copy_in_8_bits() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    found = chooser_of(nn.Sequential(*layers, nn.Linear(64, 64)), torch.randn(512, 64, requires_grad=True))
    relus = [node for node in found.problem.nodes if node.target is aten.relu.default]
    kept = {node: form for node in relus[::2] for form in found.problem.needs.forms[node] if isinstance(form, Low)}
    ways = found.problem.completed(kept)
    assert ways is not None
    assert [type(ways[node]) for node in relus] == [Low, Recompute, Low, Recompute]
    products = [node for node, _ in found.replayed(ways).replay.repeated if node.target is aten.addmm.default]
    assert len(products) == 2, "one for each ReLU of which nothing is kept"


def test_an_input_that_is_converted_again_is_converted_once() -> None:
    """The repeated first layer and its weight's gradient read one conversion, which lives until the later of the two."""
    torch.manual_seed(0)
    layers = (nn.Linear(256, 16), nn.Tanh(), nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 8))
    model = nn.Sequential(*layers, Apply(torch.sum))
    found = chooser_of(model, torch.randn(512, 256))
    ways = found.problem.completed({})
    assert ways is not None
    replay = found.replayed(ways).replay
    (x,) = replay.step.copied
    reads = [i for i, item in enumerate(replay.items) if i >= replay.border and item.reads == [replay.at[x]]]
    in_memory = [i for i in reads if i in replay.timeline.born]
    assert len(in_memory) == 1
    first = next(node for node, _ in replay.repeated if node.target is aten.addmm.default)
    assert replay.timeline.dies[in_memory[0]] > replay.timeline.born[replay.read_from[first]]
    assert replay.items[replay.copies[x]].bytes == 0
