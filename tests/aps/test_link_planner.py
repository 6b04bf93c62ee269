"""The planner of bits by link: against all choices on small cases, never worse than one width on large ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.errors import BudgetError
from fxprec.runtime.aps.link_plan import LinkPlan
from fxprec.runtime.aps.link_planner import CLOSE, MESSAGE_BYTES, NEGLIGIBLE, Layer, Problem, Width, choose
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.predict import Link

WIDTHS = (
    Width(32, 4, messages=1, sends=2),
    Width(16, 2, encode=1e-9, decode=2e-9, error=2e-6),
    Width(8, 1, encode=2e-9, decode=3e-9, error=6e-4, floor=2.0**-17),
    Width(4, 129, 256, encode=1e-9, decode=2e-9, error=0.0128),
)


def problems(most_layers: int, least_size: int) -> st.SearchStrategy[Problem]:
    def problem(sizes: list[int], steps: list[float], rate: float, rest: tuple[float, float, float, int]) -> Problem:
        latency, budget, share, seed = rest
        draw = random.Random(seed)
        buckets = sorted(draw.randrange(len(steps)) for _ in sizes)
        layers = tuple(
            Layer(f"l{k}", b, n, draw.random() * n, draw.random(), draw.choice([0.5, 1.0, 4.0]))
            for k, (n, b) in enumerate(zip(sizes, buckets, strict=True))
        )
        ready = tuple(itertools.accumulate([0.0, *steps[1:]]))
        return Problem(layers, ready, WIDTHS, Links(Link(rate, latency)), 4, budget, share)

    rest = st.tuples(
        st.sampled_from([0.0, 1e-4, 5e-3]),
        st.sampled_from([0.0, 1e-5, 1e-3, 0.01, 1.0]),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 99),
    )
    sizes = st.lists(st.integers(least_size, 2_000_000), min_size=1, max_size=most_layers)
    steps = st.lists(st.sampled_from([1e-3, 0.02, 0.2]), min_size=1, max_size=3)
    return st.builds(problem, sizes, steps, st.sampled_from([1e6, 1e7, 1e8, 1e9]), rest)


def ends_by_hand(problem: Problem, bits: list[int]) -> tuple[float, float]:
    """(end, error) of a choice, stage by stage in plain floats."""
    by_bits = {w.bits: w for w in problem.widths}
    encoder = link = decoder = busy = error = 0.0
    paid: set[tuple[int, int]] = set()
    for layer, b in zip(problem.layers, bits, strict=True):
        w = by_bits[b]
        encoder = max(encoder, problem.ready[layer.bucket] + problem.shares_cores * busy) + layer.elements * w.encode
        size = -(-layer.elements // w.block) * w.code_bytes
        link = (
            max(link, encoder) + 2 * (problem.ranks - 1) / problem.ranks * size / problem.links.between.bytes_per_second
        )
        if (layer.bucket, b) not in paid:
            paid.add((layer.bucket, b))
            link += w.messages * problem.links.between.latency
        decoder = max(decoder, link) + layer.elements * w.decode
        busy += layer.elements * (w.encode + w.decode)
        error += problem.error(layer, w)
    return max(decoder, max(problem.ready) + problem.shares_cores * busy), error


@settings(max_examples=60, deadline=None)
@given(problems(3, 100_000))  # each above a 128th of all: chosen for by itself, and 4^3 choices are all kept
def test_it_ends_as_soon_as_the_best_of_all_choices_and_rounds_as_little(problem: Problem) -> None:
    rows = []
    for bits in itertools.product([w.bits for w in problem.widths], repeat=len(problem.layers)):
        end, error = ends_by_hand(problem, list(bits))
        if error <= problem.budget:
            rows.append((end, error))
    plan = choose(problem)
    assert [layer.name for layer in plan.layers] == [layer.name for layer in problem.layers]
    end, error = ends_by_hand(problem, [layer.bits for layer in plan.layers])
    assert plan.end == pytest.approx(end, rel=1e-9)
    assert plan.error == pytest.approx(error, rel=1e-9, abs=1e-15)
    assert error <= problem.budget * (1 + 1e-9)
    best = min(row[0] for row in rows)
    assert end <= best * CLOSE * (1 + 1e-9)
    least = min(row[1] for row in rows if row[0] <= best * CLOSE * (1 - 1e-9))
    assert error <= max(least, NEGLIGIBLE * problem.budget) * (1 + 1e-6) + 1e-15


@settings(max_examples=15, deadline=None)
@given(problems(60, 100_000))
def test_it_is_never_later_than_one_width_for_all_and_its_rows_add_up(problem: Problem) -> None:
    plan = choose(problem)
    for width in problem.widths:
        end, error = ends_by_hand(problem, [width.bits] * len(problem.layers))
        if error <= problem.budget:
            assert plan.end <= end * CLOSE * (1 + 1e-9)
    assert sum(layer.error for layer in plan.layers) == pytest.approx(plan.error, rel=1e-6, abs=1e-15)
    sizes = {w.bits: w for w in problem.widths}
    sent = sum(1.5 * sizes[layer.bits].bytes_of(layer.elements) for layer in plan.layers)
    parts = {(layer.bucket, layer.bits) for layer in plan.layers}
    sent += sum(sizes[bits].sends for _, bits in parts) * 3 * MESSAGE_BYTES
    assert plan.bytes_sent == pytest.approx(sent, abs=1)
    assert choose(problem) == plan


def one(rate: float, budget: float = 0.05, ready: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3)) -> LinkPlan:
    layers = tuple(Layer(f"l{k}", k, 1_000_000, 1.0, 0.01) for k in range(len(ready)))
    return choose(Problem(layers, ready, WIDTHS[1:], Links(Link(rate, 1e-4)), 4, budget))


def test_bits_are_few_only_where_bytes_are_exposed() -> None:
    assert [layer.bits for layer in one(4e6).layers] == [4, 4, 4, 4]
    middle = one(4e7)
    assert [layer.bits for layer in middle.layers] == [16, 16, 16, 4], "the last bucket has no backward to hide behind"
    assert [layer.exposed > 0 for layer in middle.layers] == [False, False, False, True]
    assert [layer.bits for layer in one(1e11).layers] == [16, 16, 16, 16]


def test_a_tighter_budget_widens_the_layers_that_matter_most() -> None:
    layers = tuple(Layer(f"l{k}", k, 1_000_000, 1.0, 0.01, weight=4.0 if k == 1 else 1.0) for k in range(4))
    problem = Problem(layers, (0.0,) * 4, WIDTHS[1:], Links(Link(4e6)), 4, 0.01)
    bits = choose(problem).bits
    assert bits["l1"] > 4
    assert 4 in bits.values()
    assert set(choose(replace(problem, budget=1e-3)).bits.values()) <= {8, 16}


def test_a_budget_below_the_widest_width_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"error_budget=1e-09 cannot be met: the widest of \[16, 8, 4\] bits"):
        one(1e7, budget=1e-9)


def test_hundreds_of_layers_take_bounded_work() -> None:
    draw = random.Random(0)
    sizes = [draw.choice([64, 1024, 100_000, 2_000_000]) for _ in range(2000)]
    layers = tuple(Layer(f"l{k}", k // 40, n, draw.random() * n, 0.1) for k, n in enumerate(sizes))
    problem = Problem(layers, tuple(0.01 * k for k in range(50)), WIDTHS, Links(Link(3e8, 1e-4)), 8, 0.01, 1.0)
    plan = choose(problem)
    assert len(plan.layers) == 2000
    assert {layer.bits for layer in plan.layers} >= {4, 16}
