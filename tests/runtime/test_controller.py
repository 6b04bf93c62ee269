"""The controller alone, fed with statistics by hand: no graph, no model."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

import fxprec
from fxprec.config.grad_scaling import GradScaling
from fxprec.config.recipes import HFP8
from fxprec.ir import symbolic
from fxprec.numerics.stats import finish
from fxprec.plan import Group, KindCounts, Plan, Site
from fxprec.plan.scales import Cast, ScaleGraph
from fxprec.runtime.controller import MAX_DEPARTURES, Controller, Rules
from fxprec.runtime.nonfinite import NonfiniteWatch
from fxprec.runtime.scaling.keeper import ScaleKeeper
from fxprec.runtime.stats import STEPS_LATE, SiteStats
from fxprec.runtime.table import Latest
from tests.helpers import as_counts

FORWARD, GRADIENT, PARAM = 0, 1, 2
INTERVAL = 10
GROUPS = (Group(id=0, elements=12, elements_by_kind=KindCounts(output=12), low=True, order=0),)


def site(i: int, kind: str, fmt: str) -> Site:
    direction = "backward" if kind.startswith("grad") else "forward"
    return Site(
        id=i, tensor=f"t{i}", kind=kind, module="m", shape="4", group=0, format=fmt, direction=direction, source="a.py:1"
    )  # fmt: skip


def controller(storage: str = "simulate", sites: int = 3, **rules) -> Controller:
    """Sites are an output, its gradient and a parameter, again and again; gradients carry one scale after the other."""
    kinds = [("output", "1-4-3+4"), ("grad_output", "1-5-2"), ("param", "1-4-3+4")]
    plan = Plan(
        sites=tuple(site(i, *kinds[i % 3]) for i in range(sites)),
        groups=GROUPS,
        total_elements=12,
        recipe=HFP8,
        storage=storage,
    )
    rows = range(GRADIENT, sites, 3)
    casts = tuple(Cast(row, row, "1-5-2", i - 1 if i else None) for i, row in enumerate(rows))
    keeper = ScaleKeeper(GradScaling(interval=INTERVAL), ScaleGraph(casts), 0.01)
    return Controller(plan, Rules(hi="1-6-9", **rules), 256, torch.device("cpu"), keeper=keeper)


def feed(target: Controller, which: int, overflow: float = 0.0, underflow: float = 0.0, amax: float = 1.0) -> None:
    """One statistic, of equal values where the step measures, then the beginning of the next step."""
    measured = int(target.table[which, symbolic.MEASURE])
    moments = (amax, 1.0, math.log(amax) if amax > 0 else 0.0, 0.0) if measured else ()
    target.queue.push((which,), torch.tensor(as_counts(overflow, underflow, amax, *moments), dtype=torch.float64))
    target.settle()
    target.step += 1


def scale(target: Controller, row: int = GRADIENT) -> int:
    return target.keeper.exps[target.keeper.graph.casts[row]]


def test_forward_sites_are_promoted_from_the_threshold_on_and_for_good() -> None:
    it = controller()
    feed(it, FORWARD, overflow=0.0099)
    assert it.plan.sites[FORWARD].format == "1-4-3+4"
    feed(it, FORWARD, overflow=0.01)
    assert (it.plan.sites[FORWARD].format, it.plan.sites[FORWARD].promoted_at) == ("1-6-9", 1)
    plan = it.plan
    for _ in range(3):
        feed(it, FORWARD, overflow=1.0)
    assert it.plan is plan
    assert [(e.kind, e.site) for e in it.events] == [("promotion", "t0 (m, a.py:1)")]


def test_gradients_are_never_promoted_but_scaled_down_at_the_next_step() -> None:
    it = controller()
    for _ in range(2):
        feed(it, GRADIENT, amax=1.0)
    assert scale(it) < 0, "1-5-2 holds 2**-16: of a normal with deviation 1 hardly anything underflows"
    feed(it, GRADIENT, overflow=0.5, amax=2.0**30)
    assert scale(it) == 16 - 3 - 1 - 30
    assert it.plan.promoted == ()
    assert int(it.table[GRADIENT, 0]) == scale(it)


def test_a_little_overflow_waits_for_the_refresh() -> None:
    it = controller()
    feed(it, GRADIENT, amax=1.0)
    feed(it, GRADIENT, amax=1.0)
    first, table = scale(it), it.table
    feed(it, GRADIENT, overflow=0.009, amax=2.0**40)
    assert it.table is table
    found = []
    for _ in range(INTERVAL + 3):
        feed(it, GRADIENT, amax=1.0)
        found.append(scale(it))
    assert min(found) == 16 - 3 - 1 - 40, "the largest of the interval counts"
    assert found[-1] == first, "and is forgotten"


def test_what_was_not_measured_inherits_the_scale_that_comes_in() -> None:
    """A gradient that rounded to zero hid those before it: they move along, and are solved when they appear."""
    it = controller(sites=6)
    feed(it, GRADIENT, amax=2.0**-30)
    assert scale(it, GRADIENT + 3) == scale(it) > 0
    feed(it, GRADIENT + 3, amax=2.0**-40)
    assert scale(it, GRADIENT + 3) == scale(it) + 10
    assert int(it.table[GRADIENT + 3, 0]) == 10, "quantize multiplies by the quotient"
    assert int(it.table[GRADIENT + 3, symbolic.CARRIED]) == scale(it)


def test_gross_underflow_measures_at_the_next_step_and_a_little_waits() -> None:
    it = controller()
    for _ in range(2):
        feed(it, GRADIENT, amax=1.0)
    first = scale(it)
    feed(it, GRADIENT, underflow=0.04, amax=2.0**-8)
    assert not it.table[:, symbolic.MEASURE].any()
    feed(it, GRADIENT, underflow=0.06, amax=2.0**-8)
    assert it.table[GRADIENT, symbolic.MEASURE]
    feed(it, GRADIENT, underflow=0.06, amax=2.0**-8)
    assert scale(it) == first + 8


def test_steps_measure_once_an_interval() -> None:
    it = controller()
    measuring = []
    for step in range(35):
        measuring += [step] if it.table[GRADIENT, symbolic.MEASURE] else []
        feed(it, GRADIENT, amax=1.0)
    assert measuring == [0, 1, 11, 21, 31], "the first scale moved far, so the next step measures again"


def test_exponents_that_underflow_more_than_the_model_says_rise_and_come_back() -> None:
    it = controller()
    feed(it, GRADIENT, amax=1.0)
    first = scale(it)
    for _ in range(3):
        feed(it, GRADIENT, underflow=0.04, amax=1.0)
        while not it.table[GRADIENT, symbolic.MEASURE]:
            feed(it, GRADIENT, amax=1.0)
    raised = scale(it)
    assert first < raised <= 16 - 3 - 1
    for _ in range(12 * INTERVAL):
        feed(it, GRADIENT, amax=1.0)
    assert scale(it) == first


@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_inf_and_nan_leave_the_scales_alone(amax: float) -> None:
    it = controller()
    feed(it, GRADIENT, amax=1.0)
    table = it.table
    for _ in range(INTERVAL // 2):
        feed(it, GRADIENT, overflow=1.0, amax=amax)
    assert scale(it) == int(table[GRADIENT, 0])


def test_the_table_is_one_tensor_until_something_changes() -> None:
    it = controller()
    table = it.table
    feed(it, FORWARD)
    assert it.table is table
    feed(it, FORWARD, overflow=1.0)
    assert it.table is not table
    assert not torch.equal(it.table[FORWARD], table[FORWARD])
    assert torch.equal(it.table[PARAM], table[PARAM])


def test_a_thread_gets_the_value_of_its_own_argument() -> None:
    latest: Latest[object, str] = Latest(str)

    class Compared:
        """An argument during whose comparison another thread calls the function."""

        def __ne__(self, other: object) -> bool:
            return isinstance(other, str) or latest("another's") != "another's"

        def __str__(self) -> str:
            return "own"

    latest(Compared())
    assert latest(Compared()) == "own"


def test_promotions_of_another_graph_are_taken_over_by_tensor_kind_and_group() -> None:
    training, evaluation = controller(sites=6), controller(sites=6)
    feed(training, FORWARD, overflow=1.0)
    table = evaluation.table
    evaluation.promote_as(training.plan, "promoted in training")
    assert [s.id for s in evaluation.plan.promoted] == [FORWARD]
    assert not torch.equal(evaluation.table[FORWARD], table[FORWARD])
    table = evaluation.table
    evaluation.promote_as(training.plan, "promoted in training")
    assert evaluation.table is table
    assert [e.detail for e in evaluation.events] == ["1-4-3+4 -> 1-6-9: promoted in training"]


def test_scaling_can_be_switched_off() -> None:
    it = controller()
    it.keeper = None
    feed(it, GRADIENT, overflow=1.0, amax=1e9)
    assert int(it.table[GRADIENT, 0]) == 0
    assert it.events == []


@pytest.mark.parametrize(("storage", "promoted"), [("packed", True), ("simulate", False), ("native", False)])
@pytest.mark.filterwarnings("ignore:.*NaN stored as 30:fxprec.FxprecWarning")
def test_nan_promotes_where_it_would_become_a_number(storage: str, promoted: bool) -> None:
    it = controller(storage)
    for _ in range(3):
        feed(it, FORWARD, overflow=1e-6, amax=math.nan)
    assert bool(it.plan.promoted) is promoted
    assert [e.kind for e in it.events] == (["nan", "promotion"] if promoted else []), "told once, not every step"


@pytest.mark.parametrize("storage", ["packed", "simulate", "native"])
def test_an_inf_that_is_stored_as_a_number_is_told_and_promotes_at_once(storage: str) -> None:
    it = controller(storage)
    words = r"inf stored as 30: 1-4-3\+4 has no inf; forward sees the inf, backward the number; check"
    with pytest.warns(fxprec.FxprecWarning, match=words):
        feed(it, FORWARD, overflow=1e-6, amax=math.inf)
    feed(it, FORWARD, overflow=1e-6, amax=math.inf)
    assert [s.id for s in it.plan.promoted] == [FORWARD]
    assert [e.kind for e in it.events] == ["nonfinite", "promotion"]


def test_a_nan_that_gets_through_is_no_overflow() -> None:
    it = controller("simulate")
    feed(it, FORWARD, overflow=1.0, amax=math.nan)
    assert not it.plan.promoted


def test_events_stay_bounded_and_promotions_are_kept(monkeypatch) -> None:
    monkeypatch.setattr("fxprec.runtime.events.MAX_EVENTS", 100)
    it = controller()
    feed(it, FORWARD, overflow=1.0)
    for i in range(200):
        feed(it, GRADIENT, overflow=float(i % 2), amax=2.0 ** (20 * (i % 2)))
    assert len(it.events) == 100
    assert it.events[0].kind == "promotion"
    assert it.events[-1].step > 190


def test_the_latest_departures_are_kept() -> None:
    it = controller()
    it.nonfinite = NonfiniteWatch(gradients=True)
    for _ in range(MAX_DEPARTURES + 2):
        for amax in (1.0, math.inf):
            feed(it, GRADIENT, amax=amax)
    assert len(it.departures) == MAX_DEPARTURES
    assert it.departures[-1].seen_at == it.step - 1


def test_a_state_round_trip_decides_the_same() -> None:
    first = controller()
    feed(first, FORWARD, overflow=1.0)
    for amax in (1.0, 8.0):
        feed(first, GRADIENT, amax=amax)
    second = controller()
    second.load_state_dict(first.state_dict())
    for it in (first, second):
        for _ in range(INTERVAL):
            feed(it, GRADIENT, amax=2.0)
    assert second.plan == first.plan
    assert second.keeper.exps == first.keeper.exps
    assert torch.equal(second.table, first.table)
    assert second.step == first.step


def test_a_loaded_state_knows_nothing_of_the_steps_after_it() -> None:
    it = controller()
    it.nonfinite, saved = NonfiniteWatch(gradients=True), it.state_dict()
    for _ in range(2):
        it.load_state_dict(saved)  # from before an inf: the same step numbers come again
        assert (it.latest, it.nonfinite.series()) == ({}, {})
        feed(it, GRADIENT, amax=math.inf)
    assert [departure.step for departure in it.departures] == [0, 0]


@pytest.mark.parametrize("amax", [1.0, math.inf])
def test_a_promotion_that_did_not_compile_is_never_tried_again(amax: float) -> None:
    first, second = controller(), controller()
    before = first.plan
    feed(first, FORWARD, overflow=1.0)
    assert [site.id for site in first.stay_with(before)] == [FORWARD]
    second.load_state_dict(first.state_dict())
    for it in (first, second):
        with (
            nullcontext()
            if math.isfinite(amax)
            else pytest.warns(fxprec.FxprecWarning, match="or hold the module high")
        ):
            feed(it, FORWARD, overflow=1.0, amax=amax)
        assert it.plan == before


def push(target: Controller, which: int, overflow: float = 0.0, amax: float = 1.0) -> None:
    """One statistic of the step that runs, as a GPU's would be acted on."""
    moments = (amax, 1.0, math.log(amax), 0.0) if int(target.table[which, symbolic.MEASURE]) and amax else ()
    target.queue.push((which,), torch.tensor(as_counts(overflow, 0.0, amax, *moments), dtype=torch.float64))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS_LATE, "cpu", 2)


@pytest.mark.usefixtures("late")
def test_what_a_step_counted_is_acted_on_two_steps_later_but_for_the_first() -> None:
    it = controller()
    it.settle()
    it.step = 1
    push(it, GRADIENT)
    it.settle()
    assert scale(it) < 0, "step 2 is scaled: it waits for step 1"
    it.step = 2
    push(it, FORWARD, overflow=1.0)
    it.settle()
    assert not it.plan.promoted
    it.settle()
    assert not it.plan.promoted, "the same beginning seen twice is no step"
    it.step = 3
    push(it, PARAM)
    it.settle()
    assert [(s.id, s.promoted_at) for s in it.plan.promoted] == [(FORWARD, 3)]
    assert it.latest_step == 2


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_only_the_first_gradients_are_waited_for(amax: float) -> None:
    """Zero gradients, as of a head that begins at zero, made every step wait for the one before."""
    it = controller()
    assert it.keeper.waits
    it.settle()
    it.step = 1
    push(it, FORWARD)
    it.settle()
    assert it.keeper.waits, "no backward has run"
    it.step = 2
    push(it, GRADIENT, amax=amax)
    it.settle()
    assert not it.keeper.waits
    assert it.keeper.measures
    push(it, GRADIENT)
    it.settle()
    assert len(it.queue) == 1, "left for the step after"
    other = controller()
    other.load_state_dict(it.state_dict())
    assert not other.keeper.waits


@pytest.mark.usefixtures("late")
def test_moments_of_a_step_with_other_scales_are_not_solved() -> None:
    """What a scale lost that is no longer in force raised the margin of the new one."""
    it = controller()
    it.step = 1
    push(it, GRADIENT, amax=1.0)
    it.settle()
    first = scale(it)
    lost = torch.tensor(as_counts(0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0), dtype=torch.float64)
    for step in (1, 2):  # the first ran before the change
        it.keeper.note(_one(lost), step)
        it.keeper.update(2, lambda *event: None)
        assert (scale(it) > first) is (step == 2)


def _one(counts: torch.Tensor) -> SiteStats:
    return SiteStats(GRADIENT, *finish(counts.view(1, -1))[0])


@pytest.mark.usefixtures("late")
def test_statistics_are_dropped_where_rows_mean_something_else() -> None:
    it = controller(sites=6)
    push(it, FORWARD, overflow=1.0)
    same = ScaleKeeper(GradScaling(interval=INTERVAL), ScaleGraph(it.keeper.graph.variables), 0.01)
    it.adopt(it.plan, same)
    assert len(it.queue) == 1
    it.nonfinite = NonfiniteWatch(gradients=True)
    it.act_on_all()
    push(it, FORWARD)
    assert (list(it.latest), list(it.nonfinite.series())) == ([FORWARD], [FORWARD])
    it.adopt(controller(sites=6).plan, ScaleKeeper(GradScaling(), ScaleGraph(it.keeper.graph.variables[:1]), 0.01))
    assert (len(it.queue), it.latest, it.nonfinite.series()) == (0, {}, {})


def test_what_nonfinite_saw_of_a_row_keeps_its_order_in_other_company() -> None:
    watch, it = NonfiniteWatch(gradients=True), controller()
    sites = {s.id: s for s in it.plan.sites}
    for step in range(1, 13):
        rows = [SiteStats(i, 0.0, 0.0, float(10 * step + i)) for i in range(1 + step % 3)]
        assert watch.note(step, rows, sites) is None
    assert [(step, amax) for step, amax, *_ in watch.series()[2]] == [(s, 10.0 * s + 2) for s in (2, 5, 8, 11)]
    assert [step for step, *_ in watch.series()[0]] == list(range(1, 13))
