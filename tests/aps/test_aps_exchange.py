"""The exchange on real process groups against the plain definition, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from aps_checks import SIZES, exchange_all, gradients_of
from aps_ranks import run_ranks
from aps_reference import mean_of_layer

from fxprec.formats import parse
from fxprec.runtime.aps.layout import layout
from fxprec.runtime.aps.wire import wire_of

CASES = ("plain", "zero-layer", "zero-on-one-rank", "huge", "denormal", "nan", "inf", "power")
FORMATS = ("e5m2", "e4m3fn", "1-5-2", "1-4-3+4", "1-3-0", "1-2-1", "1-6-9", "bf16", "fp16")
RUNS: list[tuple[str, dict[str, Any]]] = [
    *[(case, {"format": "e5m2", "accumulate": mode}) for case in CASES for mode in ("fp32", "format", "kahan")],
    *[("plain", {"format": fmt, "accumulate": mode}) for fmt in FORMATS for mode in ("fp32", "format")],
]


@cache
def results(world: int) -> list[list[list[torch.Tensor]]]:
    return run_ranks(world, exchange_all, RUNS)


@pytest.mark.parametrize("world", [3, 5])
@pytest.mark.parametrize("run", range(len(RUNS)), ids=lambda i: f"{RUNS[i][0]}-{'-'.join(RUNS[i][1].values())}")
def test_mean_equals_the_definition_on_every_rank(world: int, run: int) -> None:
    case, options = RUNS[run]
    fmt, lay = parse(options["format"]), layout(SIZES, world)
    ranks = [gradients_of(r, case) for r in range(world)]
    owners = np.repeat(np.arange(world), lay.chunk)[: lay.total]
    start = 0
    for layer, size in enumerate(SIZES):
        if size:
            grads = [g[layer].numpy() for g in ranks]
            wanted = mean_of_layer(grads, fmt, wire_of(fmt).top, owners[start : start + size], options["accumulate"])
            for found in results(world):
                np.testing.assert_array_equal(found[run][layer].numpy(), wanted)
        start += size


@pytest.mark.parametrize("world", [3, 5])
def test_zero_stays_zero_and_non_finite_stays_in_its_layer(world: int) -> None:
    by_case = {case: results(world)[0][3 * k] for k, case in enumerate(CASES)}
    assert (by_case["zero-layer"][3] == 0).all()
    assert by_case["nan"][3].isnan().all()
    assert torch.cat([by_case["nan"][k] for k in (0, 1, 2, 4)]).isfinite().all()
    assert not by_case["inf"][0].isfinite().any()
    assert torch.equal(by_case["inf"][4], by_case["plain"][4])


def test_one_rank_gets_its_gradient_back() -> None:
    runs = [RUNS[0], ("nan", {"accumulate": "kahan", "group_size": 2})]
    plain, nan = run_ranks(1, exchange_all, runs)[0]
    for found, wanted in zip(plain + nan, gradients_of(0, "plain") + gradients_of(0, "nan"), strict=True):
        assert torch.equal(found, wanted)
