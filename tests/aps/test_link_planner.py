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
from fxprec.runtime.aps.link_planner import CLOSE, NEGLIGIBLE, choose
from fxprec.runtime.aps.link_problem import MESSAGE_BYTES, Layer, Problem, Width
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.predict import Link

WIDTHS = (
    Width(32, 4, messages=1, sends=2),
    Width(16, 2, encode=1e-9, decode=2e-9, error=2e-6),
    Width(8, 1, encode=2e-9, decode=3e-9, error=6e-4, floor=2.0**-17),
    Width(4, 129, 256, encode=1e-9, decode=2e-9, error=0.0128),
)
BY_NODES = (
    Width(
        16,
        2,
        encode=2e-9,
        decode=3e-9,
        error=2e-6,
        messages=1,
        sends=2,
        in_ring=True,
        inside_bytes=2,
        inside_error=2e-6,
    ),
    replace(WIDTHS[3], messages=1, sends=1, sends_to_all=2, rounds_sums=False, inside_bytes=2, inside_error=2e-6),
)
INSIDE = Link(1e8, 2e-4)


def problems(most_layers: int, least_size: int) -> st.SearchStrategy[Problem]:
    def problem(
        sizes: list[int], steps: list[float], rate: float, rest: tuple[bool, float, float, float, int]
    ) -> Problem:
        nodes, latency, budget, share, seed = rest
        draw = random.Random(seed)
        buckets = sorted(draw.randrange(len(steps)) for _ in sizes)
        layers = tuple(
            Layer(f"l{k}", b, n, draw.random() * n, draw.random(), draw.choice([0.5, 1.0, 4.0]))
            for k, (n, b) in enumerate(zip(sizes, buckets, strict=True))
        )
        ready = tuple(itertools.accumulate([0.0, *steps[1:]]))
        links = Links(Link(rate, latency), *((INSIDE, 2) if nodes else ()), exchange=share * 1e-3)
        widths = (*WIDTHS[:3], *BY_NODES) if nodes else WIDTHS
        return Problem(layers, ready, widths, links, 4, budget, share)

    rest = st.tuples(
        st.booleans(),
        st.sampled_from([0.0, 1e-4, 5e-3]),
        st.sampled_from([0.0, 1e-5, 1e-3, 0.01, 1.0]),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 99),
    )
    sizes = st.lists(st.integers(least_size, 2_000_000), min_size=1, max_size=most_layers)
    steps = st.lists(st.sampled_from([1e-3, 0.02, 0.2]), min_size=1, max_size=3)
    return st.builds(problem, sizes, steps, st.sampled_from([1e6, 1e7, 1e8, 1e9]), rest)


def sent_by_hand(problem: Problem, layer: Layer, w: Width) -> tuple[float, float, float]:
    """Bytes of a layer, on 4 ranks: that one rank sends of codes and inside of its node, and that leave its node."""
    size = -(-layer.elements // w.block) * w.code_bytes
    if w.inside_bytes:  # half of the elements to the node's other rank, and back; codes of a chunk to one other node
        return size / 2, layer.elements * w.inside_bytes / 2, size
    leaves = 1.5 if problem.links.node == 1 or w.in_ring else 2.0  # each of two ranks sends half of all to two others
    return 1.5 * size, 0.0, leaves * size


def ends_by_hand(problem: Problem, chosen: list[Width]) -> tuple[float, float]:
    """(end, error) of a choice, stage by stage in plain floats."""
    encoder = link = decoder = busy = error = 0.0
    paid: set[tuple[int, Width]] = set()
    for layer, w in zip(problem.layers, chosen, strict=True):
        codes, inside, leaving = sent_by_hand(problem, layer, w)
        seconds = leaving / problem.links.between.bytes_per_second
        own = 0.0
        if problem.links.inside is not None:
            seconds, own = max(seconds, codes / INSIDE.bytes_per_second), inside / INSIDE.bytes_per_second
        busy_before = busy
        if first := (layer.bucket, w) not in paid:
            paid.add((layer.bucket, w))
            seconds += problem.links.between.latency
            own += INSIDE.latency if w.inside_bytes else 0.0
            busy += problem.links.exchange * (w.messages + (3 if w.sends_to_all else 2 if w.inside_bytes else 0))
        assert first or not own or inside
        begin = problem.ready[layer.bucket] + problem.shares_cores * busy_before
        encoder = max(encoder, begin) + layer.elements * w.encode + own
        link = max(link, encoder) + seconds
        arrival = link + (w.messages - 1) * problem.links.between.latency
        decoder = max(decoder, arrival) + layer.elements * w.decode + own
        busy += layer.elements * (w.encode + w.decode)
        error += problem.error(layer, w)
    return max(decoder, max(problem.ready) + problem.shares_cores * busy), error


def widths_in(problem: Problem, plan: LinkPlan) -> list[Width]:
    """The width of each layer of a plan."""
    known = {(w.bits, w.by_nodes): w for w in problem.widths}
    return [known[layer.bits, layer.by_nodes] for layer in plan.layers]


@settings(max_examples=60, deadline=None)
@given(problems(3, 100_000))  # each above a 128th of all: chosen for by itself, and 4^3 choices are all kept
def test_it_ends_as_soon_as_the_best_of_all_choices_and_rounds_as_little(problem: Problem) -> None:
    rows = []
    for widths in itertools.product(problem.widths, repeat=len(problem.layers)):
        end, error = ends_by_hand(problem, list(widths))
        if error <= problem.budget:
            rows.append((end, error))
    plan = choose(problem)
    assert [layer.name for layer in plan.layers] == [layer.name for layer in problem.layers]
    end, error = ends_by_hand(problem, widths_in(problem, plan))
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
        end, error = ends_by_hand(problem, [width] * len(problem.layers))
        if error <= problem.budget:
            assert plan.end <= end * CLOSE * (1 + 1e-9)
    assert sum(layer.error for layer in plan.layers) == pytest.approx(plan.error, rel=1e-6, abs=1e-15)
    chosen = list(zip(problem.layers, widths_in(problem, plan), strict=True))
    sent = [sent_by_hand(problem, layer, width) for layer, width in chosen]
    parts = {
        (layer.bucket, w): 3 * w.sends if not w.by_nodes else 3 * w.sends_to_all + 2 + w.sends for layer, w in chosen
    }
    headers = sum(parts.values()) * MESSAGE_BYTES
    assert plan.bytes_sent == pytest.approx(sum(codes + 2 * inside for codes, inside, _ in sent) + headers, abs=1)
    assert plan.bytes_between == pytest.approx(sum(leaving for *_, leaving in sent), abs=1)
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


def test_layers_go_by_nodes_where_the_link_between_is_what_is_slow() -> None:
    layers = tuple(Layer(f"l{k}", k, 1_000_000, 1.0, 0.01) for k in range(4))
    found = []
    for between in (5e6, 5e8, 5e10):
        links = Links(Link(between, 1e-4), Link(2.5e8, 1e-4), 2)
        problem = Problem(layers, (0.0,) * 4, (*WIDTHS, *BY_NODES), links, 4, 0.05)
        found.append(set(choose(problem).ways.values()))
    assert found[0] == {"4 bits by nodes"}
    assert "16 bits by nodes" not in found[2]
    assert not any("by nodes" in way for way in found[2]), "a node's link is no narrower than its ranks' own"


def test_two_nodes_round_less_than_owners_do() -> None:
    """Of 4 ranks' roundings a quarter stays and the sum's; of two nodes' a half, and what bf16 loses inside."""
    problem = Problem((Layer("l", 0, 256, 1.0, 0.1),), (0.0,), WIDTHS, Links(Link(1e6), INSIDE, 2), 4, 1.0)
    assert problem.error(problem.layers[0], WIDTHS[3]) == pytest.approx(0.0128 * 1.25)
    assert problem.error(problem.layers[0], BY_NODES[1]) == pytest.approx(0.0128 * 0.5 + 2e-6 * 1.25)


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
