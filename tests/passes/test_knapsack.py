"""The covering knapsack against brute force, and against the paper's order where that is optimal."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.passes.analysis import knapsack
from fxprec.passes.analysis.knapsack import min_damage_cover


def brute_force(weights: list[int], damages: list[float], need: int) -> float | None:
    """The least damage over all 2^n covers."""
    items = range(len(weights))
    covers = (c for k in range(len(weights) + 1) for c in itertools.combinations(items, k))
    reached = [math.fsum(damages[i] for i in c) for c in covers if sum(weights[i] for i in c) >= need]
    return min(reached, default=None)


def largest_first(weights: list[int], need: int) -> list[int]:
    chosen: list[int] = []
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        if sum(weights[j] for j in chosen) >= need:
            break
        chosen.append(i)
    return chosen


small_weights = st.integers(0, 20)
element_counts = st.integers(0, 10**10)
near_ties = st.integers(0, 50).map(lambda spread: 5_000_000_000 + spread)
wide_damages = st.floats(-12, 6).map(lambda exponent: 10.0**exponent)


@pytest.mark.parametrize("weight", [small_weights, element_counts, near_ties], ids=["small", "1e10", "near ties"])
@pytest.mark.parametrize("damage", [st.floats(0, 1), wide_damages, st.just(0.25)], ids=["unit", "1e-12..1e6", "equal"])
def test_the_optimum_is_brute_force(weight, damage):
    @settings(derandomize=True, deadline=None, max_examples=40)
    @given(st.lists(st.tuples(weight, damage), max_size=10), st.floats(0, 1))
    def check(items, ratio):
        weights, damages = [w for w, _ in items], [d for _, d in items]
        need = math.ceil(ratio * sum(weights))
        cover = min_damage_cover(weights, damages, need)
        best = brute_force(weights, damages, need)
        if best is None:
            assert cover is None
            return
        assert sum(weights[i] for i in cover.chosen) >= need, "exact in integers"
        assert cover.damage == math.fsum(damages[i] for i in cover.chosen)
        assert cover.damage <= best * (1 + 1e-9)
        assert cover.gap == 0.0, "proved"

    check()


def test_with_equal_damages_the_papers_order_is_optimal():
    """Demoting the largest first is the special case of equal damage per group."""
    rng = random.Random(20230201)
    for _ in range(150):
        weights = [rng.randint(1, 10**7) for _ in range(rng.randint(1, 40))]
        need = math.ceil(rng.random() * sum(weights))
        cover = min_damage_cover(weights, [0.125] * len(weights), need)
        by_size = largest_first(weights, need)
        assert len(cover.chosen) == len(by_size), "the fewest groups"
        assert cover.damage == 0.125 * len(by_size)
        assert cover.gap == 0.0


def test_never_worse_than_the_papers_order_and_sometimes_better():
    rng = random.Random(7)
    better = 0
    for _ in range(60):
        weights = [rng.randint(10**3, 10**9) for _ in range(60)]
        damages = [10 ** rng.uniform(-9, -1) for _ in weights]
        need = math.ceil(rng.random() * sum(weights))
        cover = min_damage_cover(weights, damages, need)
        by_size = math.fsum(damages[i] for i in largest_first(weights, need))
        assert cover.damage <= by_size
        better += cover.damage < 0.9 * by_size
    assert better > 30


def test_the_same_problem_has_the_same_answer():
    rng = random.Random(3)
    weights = [rng.randint(1, 30) * 2**20 for _ in range(80)]
    damages = [rng.choice([0.1, 0.2, 0.3]) for _ in weights]
    answers = {min_damage_cover(weights, damages, sum(weights) // 2) for _ in range(4)}
    assert len(answers) == 1


def test_an_answer_short_by_one_element_is_cut_off():
    """Three parts in 1e10 fall below HiGHS's tolerances: only exact integers tell 10**10 from 10**10 - 3."""
    weights = [5_000_000_000, 4_999_999_997, 5_000_000_000, 10**10]
    damages = [1.0, 0.5, 1.0, 10.0]
    assert min_damage_cover(weights, damages, 10**10).chosen == {0, 2}
    assert min_damage_cover(weights, damages, 10**10 - 3).chosen in ({0, 1}, {1, 2})


def test_what_cannot_be_reached_is_none():
    assert min_damage_cover([3, 4], [1.0, 1.0], 8) is None
    assert min_damage_cover([], [], 1) is None
    assert min_damage_cover([-5, 4], [0.0, 1.0], 5) is None


def test_nothing_needed_chooses_nothing():
    for need in (0, -3):
        assert min_damage_cover([3, 4], [1.0, 0.0], need) == knapsack.Cover(frozenset(), 0.0, 0.0)


def test_what_a_greedy_start_takes_for_nothing_is_dropped():
    """By damage and by damage per weight, item 3 comes first, and is not needed in the end."""
    assert min_damage_cover([6, 5, 4, 1], [5.0, 1.0, 1.0, 0.1], 9, time_limit=0.0).chosen == {1, 2}


def test_a_cut_removes_the_set_that_falls_short_and_no_cover():
    rng = random.Random(13)
    for _ in range(60):
        weights = [rng.randint(1, 12) for _ in range(rng.randint(2, 9))]
        need = rng.randint(1, sum(weights))
        search = knapsack._Search(weights, [1.0] * len(weights), need, range(len(weights)), time_limit=1.0)
        sets = [frozenset(c) for k in range(len(weights) + 1) for c in itertools.combinations(range(len(weights)), k)]
        covers = [s for s in sets if sum(weights[i] for i in s) >= need]
        short = rng.choice([s for s in sets if s not in covers])
        members, count = search._cut_off(short)
        assert len(short & members) < count
        assert all(len(cover & members) >= count for cover in covers)


@pytest.mark.parametrize("need", [10_000_000_075, 10_000_000_076])
def test_weights_that_agree_to_nine_digits_are_told_apart(need):
    """With a heaviest coefficient of 1e6 and no slack, HiGHS 1.12 calls the second of these infeasible."""
    weights = [5_000_000_000, 5_000_000_050, 5_000_000_000, 5_000_000_025, 5_000_000_025]
    cover = min_damage_cover(weights, [0.25] * 5, need)
    assert len(cover.chosen) == (2 if need == 10_000_000_075 else 3)
    assert cover.gap == 0.0


def test_unbounded_damage_is_taken_only_where_needed():
    weights, damages = [10, 10, 3, 5], [math.inf, math.nan, 1.0, 2.0]
    assert min_damage_cover(weights, damages, 8).chosen == {2, 3}
    forced = min_damage_cover(weights, damages, 12)
    assert forced.chosen == {0, 2}
    assert forced.damage == math.inf


def test_out_of_time_the_best_cover_found_comes_with_an_honest_gap():
    rng = random.Random(5)
    weights = [rng.randint(10**6, 10**7) for _ in range(40)]
    damages = [rng.uniform(0.5, 1.0) for _ in weights]
    need = sum(weights) // 2
    cover = min_damage_cover(weights, damages, need, time_limit=0.0)
    assert sum(weights[i] for i in cover.chosen) >= need
    assert cover.gap == 1.0, "nothing is proved"
    best = min_damage_cover(weights, damages, need)
    assert best.gap == 0.0
    assert best.damage <= cover.damage


def test_hundreds_of_groups_are_solved_to_optimality():
    rng = random.Random(11)
    weights = [rng.randint(10**6, 10**9) for _ in range(500)]
    damages = [w * rng.uniform(0.9, 1.1) * 1e-9 for w in weights]
    assert min_damage_cover(weights, damages, sum(weights) * 6 // 10, time_limit=10).gap == 0.0
