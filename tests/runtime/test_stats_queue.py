"""Statistics on their way to the controller: the queue, and what rows of counts are finished to."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fxprec.numerics.stats import WIDTH, Counts, finish
from fxprec.runtime.stats import MAX_PENDING, StatsQueue
from tests.helpers import as_counts


def test_the_queue_keeps_order_and_never_grows_without_bound() -> None:
    queue = StatsQueue()
    for i in range(MAX_PENDING + 5):
        rows = [*as_counts(0.0, 0.0, float(i)), *as_counts(0.5, 0.25, -1.0)]
        queue.push((0, 1), torch.tensor(rows, dtype=torch.float64))
    assert len(queue) == MAX_PENDING
    ((step, found),) = queue.take()
    assert step is None, "no step has begun since"
    assert [(s.site, s.amax) for s in found[:2]] == [(0, 5.0), (1, -1.0)]
    assert (found[1].overflow_ratio, found[1].underflow_ratio) == (0.5, 0.25)
    assert len(queue) == 0


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switching")
def test_threads_push_while_another_takes() -> None:
    """No vector is lost or read twice, and none ends a step with 'deque mutated during iteration'."""
    queue, found = StatsQueue(), []

    def push(site: int) -> None:
        for i in range(MAX_PENDING // 4):  # nothing is dropped
            queue.push((site,), torch.tensor(as_counts(0.0, 0.0, float(i)), dtype=torch.float64))
            queue.close(i)

    with ThreadPoolExecutor(4) as pool:
        pushing = [pool.submit(push, site) for site in range(4)]
        while not all(result.done() for result in pushing):
            assert len(queue) <= MAX_PENDING
            list(queue.peek())
            queue.state()
            found += [stats for _, rows in queue.take() for stats in rows]
    assert [result.result() for result in pushing] == [None] * 4
    found += [stats for _, rows in queue.take() for stats in rows]
    for site in range(4):
        assert [s.amax for s in found if s.site == site] == [float(i) for i in range(MAX_PENDING // 4)]


def test_what_waits_survives_json() -> None:
    queue, other = StatsQueue(), StatsQueue()
    queue.push((0, 1), torch.tensor([*as_counts(0.0, math.nan, math.inf), *as_counts(0.5, 0.25, 3.0)]).double())
    queue.close(7)
    queue.push((2,), torch.tensor(as_counts(0.1, 0.2, math.nan), dtype=torch.float64))
    state = json.dumps(queue.state(), allow_nan=False)
    other.load(json.loads(state))
    assert repr(list(other.take())) == repr(list(queue.take()))


def _by_hand(c: Counts) -> tuple[float, ...]:
    """What `finish` makes of one row, in Python's own arithmetic."""
    share = max(c.elements, 1.0)
    basic = (c.overflow / share, c.underflow / share, c.amax * 2.0**-c.carried)
    if c.nonzero <= 0:
        return (*basic, 0.0, -1.0 if c.nonzero < 0 else 0.0, 0.0, 0.0)
    mean = c.logs / c.nonzero
    deviation = math.sqrt(max(c.squared_logs / c.nonzero - mean * mean, 0.0))
    rms = math.sqrt(c.squares / share) * 2.0**-c.moments_exp
    return (*basic, rms, c.nonzero / share, mean - c.moments_exp * math.log(2), deviation)


@pytest.mark.parametrize("measured", ["all", "some", "none"])
def test_all_rows_at_once_have_the_bits_of_one_after_the_other(measured: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(300, WIDTH, dtype=torch.float64, generator=generator) * 100
    rows[:, 8:] = torch.randint(-126, 127, (300, 2), generator=generator)
    rows[::7, 2], rows[::11, 1], rows[5], rows[::13, 5:8] = math.inf, math.nan, 0, math.inf
    rows[:: {"all": 301, "some": 2, "none": 1}[measured], 4] = -1
    rows[::9, 4] *= 0 if measured == "some" else 1
    for found, row in zip(finish(rows), rows.tolist(), strict=True):
        assert repr(tuple(found)) == repr(_by_hand(Counts(*row)))
