"""The simulated ranks of benchmarks/papers are the exchange's own definition, and Table 9's shape on few elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from aps_reference import mean_of_layer

from benchmarks.papers.ranks import Exchange
from benchmarks.papers.tables.aps_roundoff import relative_l2, synthetic

RANKS = 6


@pytest.mark.parametrize(
    "exchange",
    [
        *(Exchange("1-4-3", accumulate=mode) for mode in ("fp32", "format", "kahan")),
        *(Exchange("1-5-2", group_size=size) for size in (2, 3, 6)),
        Exchange("1-5-2:ieee", "raw"),
        Exchange("1-4-3", "none"),
        Exchange("1-3-0"),
    ],
    ids=str,
)
def test_simulated_ranks_compute_what_the_exchange_does(exchange: Exchange) -> None:
    grads = torch.randn(RANKS, 65, generator=torch.Generator().manual_seed(0)) * 1e3
    size = exchange.group_size or 1
    first_last = torch.roll(grads, size, 0)  # a ring's sum begins with the second
    options = {"format": exchange.format, "scaling": exchange.scaling, "accumulate": exchange.accumulate}
    options |= {} if exchange.group_size is None else {"group_size": size}
    wanted = mean_of_layer([g.numpy() for g in first_last], np.zeros(65, dtype=np.int64), options)
    np.testing.assert_array_equal(exchange.mean(grads).numpy(), wanted)


def test_table_9_is_a_u_over_the_group_size_and_fp32_sums_lie_below_it() -> None:
    made = synthetic(0, 512)
    exact = made.double().mean(0)
    ways = {size: Exchange("1-5-2", group_size=size) for size in (4, 8, 16, 32, 64)} | {256: Exchange("1-5-2")}
    found = {size: relative_l2(way.mean(made), exact) for size, way in ways.items()}
    assert found[4] > found[8] > found[16]
    assert found[32] < found[64] < found[256]
    assert relative_l2(Exchange("1-5-2", accumulate="fp32").mean(made), exact) < min(found.values()) / 3
