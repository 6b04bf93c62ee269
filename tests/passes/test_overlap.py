"""Copies to host memory beside kernels, on timelines of given times: what is exposed, and when each wait comes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fxprec.compat.order import OrderedKernel, _KernelOrder
from fxprec.passes.analysis.kernel_order import Kernel, saving_order
from fxprec.passes.crossings.overlap import Copy, place_waits

INF = float("inf")


def chain(kernels: int, copied: int, seconds: float) -> list[Copy]:
    """Return copies of the results of the first kernels, each read by nothing else in forward."""
    return [Copy(i, i, 1, seconds) for i in range(copied)]


@pytest.mark.parametrize("kernels", [1, 5, 40])
@pytest.mark.parametrize(("kernel", "copy"), [(2.0, 1.0), (1.0, 1.0), (1.0, 3.0), (0.5, 4.0)])
def test_with_memory_to_spare_what_is_exposed_is_the_excess_of_the_longer_stream(
    kernels: int, kernel: float, copy: float
) -> None:
    """Copies begin behind the first kernel; the last begins behind the last kernel, or behind the copy before it."""
    found = place_waits([kernel] * kernels, [0] * kernels, chain(kernels, kernels, copy), INF)
    closed_form = max(copy, kernel + kernels * copy - kernels * kernel)
    assert found.exposed == pytest.approx(closed_form)


def test_a_copy_that_later_kernels_cover_is_not_exposed_and_is_waited_for_once_it_is_done() -> None:
    found = place_waits([1.0] * 10, [0] * 10, [Copy(0, 0, 1, 3.5), Copy(1, 1, 1, 2.0)], INF)
    assert found.exposed == 0
    assert found.after == [4, 6], "done at 1 + 3.5 and, behind it on the stream, at 6.5"


def test_without_memory_every_copy_is_exposed_in_full() -> None:
    found = place_waits([1.0] * 6, [10] * 6, chain(6, 3, 2.0), 10)
    assert found.exposed == pytest.approx(3 * 2.0)
    assert found.after == [0, 1, 2]


def test_memory_for_one_more_tensor_hides_one_copy_at_a_time() -> None:
    """Each copy of 2 has one kernel of 1 beside it, until the next result needs its place."""
    found = place_waits([1.0] * 6, [10] * 6, chain(6, 3, 2.0), 11)
    assert found.after == [1, 2, 4]
    assert found.exposed == pytest.approx(1 + 1)


def test_a_tensor_that_is_read_later_waits_for_its_copy_behind_its_reader() -> None:
    found = place_waits([1.0] * 5, [10] * 5, [Copy(0, 3, 1, 2.0)], 10)
    assert (found.after, found.exposed) == ([3], 0.0)


def test_behind_the_last_kernel_all_copies_are_waited_for() -> None:
    found = place_waits([1.0, 1.0], [0, 0], [Copy(1, 1, 1, 5.0)], INF)
    assert (found.after, found.exposed) == ([1], 5.0)


RELOAD = SimpleNamespace(node=SimpleNamespace(op_overload="reload"))
KERNEL = SimpleNamespace(node=SimpleNamespace())


def test_a_copy_that_begins_early_stays_before_its_kernel_in_an_order_that_saves_memory() -> None:
    """Made late it would hold less: that is what the order is for, and what the plan has weighed already."""
    kernels = [[KERNEL], [RELOAD], [KERNEL], [KERNEL]]
    found: list[OrderedKernel] = [
        ({"a": 1}, {}, frozenset(), None, frozenset()),
        ({"back": 100}, {}, frozenset(), None, frozenset()),
        ({"b": 1}, {"a": 1}, frozenset({0}), None, frozenset()),
        ({"c": 1}, {"b": 1, "back": 100}, frozenset({1, 2}), None, frozenset()),
    ]
    assert saving_order([Kernel(*each[:3]) for each in found]) == [0, 2, 1, 3]
    held = _KernelOrder(lambda *_: None, "test", None, frozenset({"reload"}))._held_back(found, kernels)  # type: ignore[arg-type]
    assert saving_order([Kernel(*each[:3]) for each in held]) == [0, 1, 2, 3]
