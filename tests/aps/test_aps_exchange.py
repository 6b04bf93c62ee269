"""The exchange on real process groups against the plain definition, bit for bit, on 1, 3 and 5 ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from aps_buckets import SIZES, exchange, gradients_of
from aps_ranks import run_ranks, several
from aps_reference import mean_of_bucket

from fxprec.aps import APSState
from fxprec.runtime.aps import groups, state

CASES = ("plain", "zero-layer", "zero-on-one-rank", "huge", "denormal", "nan", "inf", "power")
FORMATS = ("e5m2", "e4m3fn", "1-5-2", "1-4-3+4", "1-3-0", "1-2-1", "1-6-9", "bf16", "fp16")
RUNS: list[tuple[str, dict[str, Any]]] = [
    *[(case, {"accumulate": mode}) for case in CASES for mode in ("fp32", "format", "kahan")],
    *[("plain", {"format": fmt, "accumulate": mode}) for fmt in FORMATS for mode in ("fp32", "format")],
    *[
        (case, {"format": fmt, "accumulate": mode, "group_size": size})
        for case, fmt in (("plain", "1-4-3"), ("plain", "1-6-9"), ("nan", "e5m2"), ("zero-on-one-rank", "e5m2"))
        for mode in ("format", "kahan")
        for size in (1, 2, 3, 8)
    ],
    *[("plain", {"format": name}) for name in ("dynamic-tree", "dynamic-uniform", "mantissa", "linear")],
    *[(case, {"format": "1-2-1/256:e8m0"}) for case in CASES],
    *[("plain", {"format": fmt}) for fmt in ("mxfp4", "int4/64:bf16", "1-4-3/8:e8m0")],
    *[("plain", {"format": fmt, "scaling": "none"}) for fmt in ("1-4-3", "1-3-0", "bf16")],
    *[("nan", {"format": "1-4-3", "scaling": "none", "accumulate": "format"})],
    *[("plain", {"format": "1-4-3", "scaling": "raw", "accumulate": mode}) for mode in ("fp32", "format")],
    ("plain", {"format": "1-5-2:ieee", "scaling": "raw", "accumulate": "format", "group_size": 2}),
    ("plain", {"format": "1-4-3:ieee", "scaling": "raw", "accumulate": "format"}),
]
RANDOM: list[dict[str, Any]] = [
    {"rounding": "stochastic"},
    {"rounding": "stochastic", "accumulate": "kahan"},
    {"rounding": "stochastic", "accumulate": "format", "group_size": 2},
    {"rounding": "stochastic", "error_feedback": True, "format": "linear"},
    {"rounding": "stochastic", "error_feedback": True, "format": "1-2-1/256:e8m0"},
]
Results = Callable[[int], list[dict[str, Any]]]
SUBSET = ("plain", {"format": "1-4-3", "accumulate": "format", "group_size": 2})


def definitions(rank: int, world: int) -> list[torch.Tensor]:
    """All runs; states of one group size share their process groups, which take most of the time to make."""
    with mock.patch.object(state, "make_groups", cache(groups.make_groups)):
        return [exchange(APSState(**options), gradients_of(rank, case)) for case, options in RUNS]


def by_case(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Each case in the default format, and the last of the runs as "raw"."""
    runs = {**{case: (case, {}) for case in CASES}, "raw": RUNS[-1]}
    return {name: exchange(APSState(**options), gradients_of(rank, case)) for name, (case, options) in runs.items()}


def random(rank: int, world: int) -> list[torch.Tensor]:
    """Two steps of each, so that residuals are among them."""
    found = []
    for options in RANDOM:
        aps = APSState(**options)
        parameters = [torch.nn.Parameter(torch.empty(n)) for n in SIZES]
        found += [exchange(aps, gradients_of(rank), parameters) for _ in range(2)]
    return found


def parts_of_the_world(rank: int, world: int) -> tuple[list[int], torch.Tensor]:
    """Two process groups side by side, one of them with sub-groups; the ranks of mine, and its mean."""
    parts = [[1, 3, 4], [0, 2]] if world == 5 else [list(range(world))]
    made = [dist.new_group(part) for part in parts]
    mine = next(k for k, part in enumerate(parts) if rank in part)
    case, options = SUBSET
    return parts[mine], exchange(APSState(process_group=made[mine], **options), gradients_of(rank, case))


def by_world(once: Callable[..., Any], name: str, *checks: Callable[..., Any]) -> Results:
    """Return what gives each rank's results for a world's size; they are read from their file once."""

    @cache
    def of(world: int) -> list[dict[str, Any]]:
        return once(f"{name}-{world}", lambda: run_ranks(world, several, [(check, ()) for check in checks]))

    return of


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> Results:
    return by_world(once, "exchange", definitions, random)


@pytest.fixture(scope="module")
def few(once: Callable[..., Any]) -> Results:
    return by_world(once, "exchange-few", by_case, parts_of_the_world)


def assert_is_the_definition(found: torch.Tensor, ranks: list[int], case: str, options: dict[str, Any]) -> None:
    wanted = mean_of_bucket([[g.numpy() for g in gradients_of(r, case)] for r in ranks], options)
    for layer, (a, b) in enumerate(zip(found.split(list(SIZES)), wanted, strict=True)):
        np.testing.assert_array_equal(a.numpy(), b, err_msg=f"{case} {options}, layer {layer}")


@pytest.mark.parametrize("world", [3, 5])
def test_the_mean_is_that_of_the_definition(results: Results, world: int) -> None:
    for k, (case, options) in enumerate(RUNS):
        assert_is_the_definition(results(world)[0]["definitions"][k], list(range(world)), case, options)


@pytest.mark.parametrize("world", [3, 5])
@pytest.mark.parametrize("what", ["definitions", "random"])
def test_all_ranks_get_the_same_bits(results: Results, world: int, what: str) -> None:
    first, *others = results(world)
    for rank in others:
        for found, wanted in zip(rank[what], first[what], strict=True):
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("world", [3, 5])
def test_zero_stays_zero_and_non_finite_stays_in_its_layer(few: Results, world: int) -> None:
    found = {case: mean.split(list(SIZES)) for case, mean in few(world)[0]["by_case"].items()}
    assert (found["zero-layer"][3] == 0).all()
    assert found["nan"][3].isnan().all()
    assert torch.cat([found["nan"][k] for k in (0, 1, 2, 4)]).isfinite().all()
    assert not found["inf"][0].isfinite().any()
    assert torch.equal(found["inf"][4], found["plain"][4])


def test_raw_gradients_overflow_to_inf_and_are_divided_last(few: Results) -> None:
    found = few(5)[0]["by_case"]["raw"].split(list(SIZES))
    wanted = [torch.stack(layer).sum(0) for layer in zip(*(gradients_of(r) for r in range(5)), strict=True)]
    assert not found[4].isfinite().any(), "sums of 1e6, where the format ends at 240"
    assert found[0].abs().max() == 0, "1e-6, where it begins at 2^-9"
    small = found[2].isfinite()
    assert small.all()
    assert found[2].item() == pytest.approx(wanted[2].item() / 5, abs=0.05)


def test_process_groups_side_by_side_with_subgroups_of_their_own(few: Results) -> None:
    for rank in few(5):
        ranks, found = rank["parts_of_the_world"]
        assert len(ranks) in (2, 3)
        assert_is_the_definition(found, ranks, *SUBSET)


def one_rank(rank: int, world: int) -> list[torch.Tensor]:
    states = [APSState(), APSState(accumulate="kahan", group_size=2), APSState("1-3-0", rounding="stochastic")]
    return [exchange(aps, gradients_of(0, case)) for aps in states for case in ("plain", "nan")]


def test_one_rank_gets_its_gradient_back() -> None:
    wanted = [torch.cat(gradients_of(0, case)) for case in ("plain", "nan")] * 3
    for found, plain in zip(run_ranks(1, one_rank)[0], wanted, strict=True):
        assert torch.equal(found.view(torch.int32), plain.view(torch.int32))
