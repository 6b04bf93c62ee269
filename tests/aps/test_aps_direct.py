"""Exchanges over Gloo that take one latency: their results, and that nothing goes around a ring."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from aps_buckets import exchange, gradients_of
from aps_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, LayerBits, LinkPlan, aps_hook
from fxprec.runtime.aps import exchange as exchanges
from fxprec.runtime.aps.exchange import Largest, all_gather, ring_steps, sum_over_ranks

WORLD = 3
LENGTHS = (0, 1, 2, 7, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def values_of(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def results(rank: int, world: int) -> dict[str, Any]:
    """What each function returns, directly and in a ring."""
    group = dist.group.WORLD
    found: dict[str, Any] = {"steps": ring_steps(group)}
    for way, limit in (("direct", exchanges.DIRECT_BYTES), ("ring", -1)):
        with mock.patch.object(exchanges, "DIRECT_BYTES", limit):
            found[way] = [
                *[sum_over_ranks(values_of(rank, n, dtype), group) for n in LENGTHS for dtype in DTYPES],
                *[all_gather(values_of(rank, n, dtype), group) for n in LENGTHS for dtype in DTYPES],
                *[Largest((values_of(rank, n, torch.float32) * 40).to(torch.int8), group).wait() for n in LENGTHS],
            ]
            found[f"bucket {way}"] = exchange(APSState("e4m3fn", error_feedback=True), gradients_of(rank, "plain"))
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(WORLD, results)


def test_they_are_those_of_the_definition(found: list[dict[str, Any]]) -> None:
    for rank in found:
        results = iter(rank["direct"])
        for length in LENGTHS:
            for dtype in DTYPES:
                rows = torch.stack([values_of(r, length, dtype) for r in range(WORLD)])
                wide = rows.to(torch.promote_types(dtype, torch.float32))
                assert torch.equal(next(results), ((wide[0] + wide[1]) + wide[2]).to(dtype)), (length, dtype)
        for length in LENGTHS:
            for dtype in DTYPES:
                assert torch.equal(next(results), torch.stack([values_of(r, length, dtype) for r in range(WORLD)]))
        for length in LENGTHS:
            rows = torch.stack([(values_of(r, length, torch.float32) * 40).to(torch.int8) for r in range(WORLD)])
            assert torch.equal(next(results), rows.amax(0))


def test_a_ring_has_the_same_bits(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert all(torch.equal(a, b) for a, b in zip(rank["direct"], rank["ring"], strict=True))
        assert torch.equal(rank["bucket direct"], rank["bucket ring"])
        assert rank["steps"] == 2 * (WORLD - 1)


def low_rank(ddp: DistributedDataParallel) -> APSState:
    rows = [(name.removeprefix("module."), p.numel()) for name, p in ddp.named_parameters()]
    layers = tuple(LayerBits(name, 0, size, 16, 0.0, 0.0, low_rank=2) for name, size in rows)
    plan = LinkPlan(WORLD, 1e9, 0.0, 1.0, 0.0, (0.0,), 0.0, 0, layers)
    return APSState("e4m3fn", bits="by link", model=ddp, plan=plan, link="8Gbit/s", low_rank=2, error_budget=1e9)


STATES = {
    "8 bits": lambda ddp: APSState("e4m3fn"),
    "4 bits": lambda ddp: APSState("1-2-1/256:e8m0"),
    "low rank": low_rank,
}


def collectives(rank: int, world: int) -> dict[str, list[str]]:
    """The collectives of a step of each state."""
    found = {}
    for name, make in STATES.items():
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
        state = make(ddp)
        ddp.register_comm_hook(state, aps_hook)
        ddp(torch.ones(2, 64)).sum().backward()
        called: list[str] = []
        names = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather")
        patches = [mock.patch.object(dist, n, noted(called, n)) for n in names]
        patches.append(mock.patch.object(exchanges, "all_gather_into", noted(called, "all_gather_into")))
        for patch in patches:
            patch.start()
        ddp(torch.ones(2, 64)).sum().backward()
        for patch in patches:
            patch.stop()
        found[name] = called
    return found


def noted(called: list[str], name: str) -> Any:
    real = exchanges.all_gather_into if name == "all_gather_into" else getattr(dist, name)

    def call(*args: Any, **options: Any) -> Any:
        called.append(name)
        return real(*args, **options)

    return call


def test_a_small_bucket_takes_one_latency_for_each_exchange() -> None:
    for rank in run_ranks(WORLD, collectives):
        assert rank == {
            "8 bits": ["all_to_all_single"] * 3,  # exponents, codes to owners, codes of the sum
            "4 bits": ["all_to_all_single"] * 3,
            "low rank": ["all_to_all_single"] * 4,  # P and Q, each to owners and back
        }
