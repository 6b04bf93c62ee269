"""The order of kernels: what takes memory comes late, what gives it back early."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxprec.passes.analysis.kernel_order import Kernel, better_order, peak_bytes, saving_order


def kernels(*rows: tuple[str, dict[str, int], str]) -> list[Kernel]:
    """Return kernels from their names, sizes and operands; each waits for those that make what it reads."""
    sizes = {name: size for _, makes, _ in rows for name, size in makes.items()}
    makers = {name: i for i, (_, makes, _) in enumerate(rows) for name in makes}
    return [
        Kernel(
            makes,
            {name: sizes.get(name, 0) for name in reads.split()},
            frozenset(makers[name] for name in reads.split() if name in makers),
        )
        for _, makes, reads in rows
    ]


# The backward of an MLP in a region, as autograd orders it: `up` and `gelu` are computed again.
MLP = (
    ("gradient of gelu", {"dgelu": 40}, "dy"),
    ("up", {"up": 40}, "x"),
    ("gelu", {"gelu": 40}, "up"),
    ("gradient of the second weight, bf16", {"dw2": 5}, "dy gelu"),
    ("gradient of the second weight, float32", {"grad2": 10}, "dw2"),
    ("gradient of up", {"dup": 40}, "dgelu up"),
    ("gradient of the first weight, bf16", {"dw1": 5}, "dup x"),
    ("gradient of the first weight, float32", {"grad1": 10}, "dw1"),
)


def test_a_gradient_is_computed_where_it_is_read_and_widened_at_the_end() -> None:
    given = kernels(*MLP)
    order = saving_order(given)
    assert [MLP[i][0] for i in order] == [
        "up",
        "gelu",
        "gradient of the second weight, bf16",
        "gradient of gelu",
        "gradient of up",
        "gradient of the first weight, bf16",
        "gradient of the second weight, float32",
        "gradient of the first weight, float32",
    ]
    results = frozenset({"grad1", "grad2"})
    assert peak_bytes(given, range(len(given)), results) == 40 * 3 + 10
    assert peak_bytes(given, order, results) == 40 * 3 + 5


def test_what_is_not_made_here_lives_from_the_start_to_its_last_reader() -> None:
    first = Kernel({"a": 1}, {"saved": 100}, frozenset())
    second = Kernel({"b": 10}, {"a": 1}, frozenset({0}))
    assert peak_bytes([first, second], [0, 1]) == 101
    assert peak_bytes([second, Kernel({"c": 1}, {"saved": 100}, frozenset())], [0, 1]) == 111


@pytest.mark.parametrize("seed", range(20))
def test_any_graph_keeps_its_dependencies(seed: int) -> None:
    draw = random.Random(seed)
    given = []
    for i in range(40):
        after = frozenset(draw.sample(range(i), min(i, draw.randint(0, 3))))
        given.append(Kernel({f"b{i}": draw.randint(0, 9)}, {f"b{j}": 9 for j in after}, after))
    order = saving_order(given)
    assert sorted(order) == list(range(40))
    place = {i: step for step, i in enumerate(order)}
    assert all(place[j] < place[i] for i, kernel in enumerate(given) for j in kernel.after)


def test_a_result_in_the_place_of_what_nothing_reads_later_takes_no_memory() -> None:
    first, second, third = kernels(("a", {"a": 4}, ""), ("b", {"b": 4}, "a"), ("c", {"c": 1}, "b"))
    over = replace(second, over=frozenset("a"))
    assert peak_bytes([first, second, third], range(3)) == 8
    assert peak_bytes([first, over, third], range(3)) == 5
    assert peak_bytes([first, over, third], range(3), kept={"a"}) == 9, "a lives on beside b"
    read_later = replace(third, reads={"a": 4, "b": 4})
    assert peak_bytes([first, over, read_later], range(3)) == 9
    given = replace(over, reads={"x": 4}, over=frozenset("x"))  # x is the caller's
    assert peak_bytes([given, third], range(2)) == 8


def test_a_circle_is_refused() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        saving_order([Kernel({}, {}, frozenset({1})), Kernel({}, {}, frozenset({0}))])


def test_an_order_is_better_where_it_is_with_the_workspaces() -> None:
    """Both orders hold the same at most. The given one runs the kernel with a workspace where most is live."""
    given = [
        Kernel({"a": 8}, {}, frozenset()),
        Kernel({"b": 8}, {}, frozenset()),
        Kernel({"d": 8}, {"a": 8}, frozenset({0}), workspace=4),
        Kernel({"e": 8}, {"b": 8}, frozenset({1})),
        Kernel({"f": 8}, {"d": 8, "e": 8}, frozenset({2, 3})),
    ]
    order = saving_order(given)
    assert peak_bytes(given, range(5)) == 24 + 4
    assert peak_bytes(given, order) == 24
    assert peak_bytes([replace(kernel, workspace=0) for kernel in given], range(5)) == 24
    assert better_order(given) == order
    assert better_order([replace(kernel, workspace=0) for kernel in given]) is None


@given(st.randoms(use_true_random=False))
def test_a_better_order_has_a_lower_peak(draw: random.Random) -> None:
    kernels = []
    for i in range(draw.randint(1, 30)):
        after = frozenset(draw.sample(range(i), min(i, draw.randint(0, 3))))
        reads = {f"b{j}": 9 for j in after}
        kernels.append(Kernel({f"b{i}": 9}, reads, after, workspace=draw.choice((0, 0, 20))))
    order = better_order(kernels)
    if order is None:
        assert peak_bytes(kernels, saving_order(kernels)) >= peak_bytes(kernels, range(len(kernels)))
    else:
        assert peak_bytes(kernels, order) < peak_bytes(kernels, range(len(kernels)))


def test_an_order_that_breaks_dependencies_is_left() -> None:
    assert better_order([Kernel({"a": 1}, {"b": 1}, frozenset({1})), Kernel({"b": 1}, {}, frozenset())]) == [1, 0]
