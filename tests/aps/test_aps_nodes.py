"""Gradients in 16 bits inside of nodes and in codes between them, against the plain definition, on 2 nodes of 2 ranks."""

from __future__ import annotations

from collections import Counter
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
from aps_reference import mean_of_layer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, aps_hook
from fxprec.errors import ConfigError
from fxprec.runtime.aps import exchange as exchange_module
from fxprec.runtime.aps import groups, state

WORLD, NODE = 4, 2
FORMATS = ("e5m2", "e4m3fn", "1-2-1/256:e8m0", "dynamic-tree", "fp16")
CASES = ("plain", "zero-layer", "zero-on-one-rank", "denormal", "nan", "power")
RUNS = [*(("plain", fmt) for fmt in FORMATS), *((case, "e5m2") for case in CASES[1:])]


def definitions(rank: int, world: int) -> list[Tensor]:
    with mock.patch.object(state, "make_groups", cache(groups.make_groups)):
        return [exchange(APSState(fmt, group_size=NODE), gradients_of(rank, case)) for case, fmt in RUNS]


def random(rank: int, world: int) -> list[Tensor]:
    aps = APSState("1-2-1/256:e8m0", group_size=NODE, rounding="stochastic")
    return [exchange(aps, gradients_of(rank)) for _ in range(3)]


def refused(rank: int, world: int) -> str:
    try:
        APSState(group_size=3)
    except ConfigError as error:
        return str(error)
    return "no error"


def bytes_to_other_nodes(rank: int, world: int) -> dict[str, int]:
    """Bytes of codes that this rank addresses to ranks of other nodes; each gets the message of a gather."""
    sent: Counter[str] = Counter()

    def counted(what: str, work: Callable[..., Any], *, in_parts: bool) -> Callable[..., Any]:
        def call(out: Tensor, message: Tensor, *, group: dist.ProcessGroup, **others: Any) -> Any:
            ranks = dist.get_process_group_ranks(group)
            each = message.nbytes // (len(ranks) if in_parts else 1)
            sent[what] += each * sum(r // NODE != rank // NODE for r in ranks)
            return work(out, message, group=group, **others)

        return call

    found = {}
    for name, size in (("flat", None), ("by nodes", NODE)):
        sent.clear()
        scatter = counted("scatter", dist.all_to_all_single, in_parts=True)
        gather = counted("gather", exchange_module.all_gather_into, in_parts=False)
        with (
            mock.patch.object(dist, "all_to_all_single", scatter),
            mock.patch.object(exchange_module, "all_gather_into", gather),
        ):
            exchange(APSState("e5m2", group_size=size), [torch.randn(4096)])
        found |= {f"{name}, {what}": count for what, count in sent.items()}
    return found


def training(rank: int, world: int) -> list[Tensor]:
    """Several buckets, a layer kept high, three steps; the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)), nn.Linear(40, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    ddp.register_comm_hook(APSState("e4m3fn", group_size=NODE, keep_high=["4"], model=ddp), aps_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def plain_training(rank: int, world: int) -> list[Tensor]:
    with mock.patch.object(DistributedDataParallel, "register_comm_hook"):
        return training(rank, world)


CHECKS = (definitions, random, refused, bytes_to_other_nodes, training, plain_training)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("nodes", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def mean_by_nodes(case: str, fmt: str) -> list[np.ndarray]:
    """The definition: each node's mean of bf16 gradients, by chunk the mean of nodes in codes, sent in bf16."""
    ranks = [[g.numpy() for g in gradients_of(r, case)] for r in range(WORLD)]
    chunk = -(-sum(SIZES) // NODE)
    found, at = [], 0
    with np.errstate(invalid="ignore"):
        for k, size in enumerate(SIZES):
            nodes = []
            for first in range(0, WORLD, NODE):
                total = bf16(ranks[first][k])
                for r in range(first + 1, first + NODE):
                    total = total + bf16(ranks[r][k])
                nodes.append((total / np.float32(NODE)).astype(np.float32))
            cuts = [c - at for c in range(0, sum(SIZES), chunk) if at < c < at + size]
            parts = zip(*(np.split(n, cuts) for n in nodes), strict=True)
            means = [mean_of_layer(list(p), np.full(p[0].size, -1), {"format": fmt}) for p in parts]
            found.append(bf16(np.concatenate(means)))
            at += size
    return found


@pytest.mark.parametrize("k", range(len(RUNS)), ids=[f"{case}, {fmt}" for case, fmt in RUNS])
def test_the_mean_is_that_of_the_definition(results: list[dict[str, Any]], k: int) -> None:
    found = results[0]["definitions"][k].split(list(SIZES))
    for a, b in zip(found, mean_by_nodes(*RUNS[k]), strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


@pytest.mark.parametrize("what", ["definitions", "random", "training"])
def test_all_ranks_get_the_same_bits(results: list[dict[str, Any]], what: str) -> None:
    first, *others = results
    for rank in others:
        for found, wanted in zip(rank[what], first[what], strict=True):
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_random_rounding_differs_from_step_to_step(results: list[dict[str, Any]]) -> None:
    first, second, _ = results[0]["random"]
    assert not torch.equal(first, second)


def test_a_node_sends_others_half_the_codes(results: list[dict[str, Any]]) -> None:
    """Of 4,096 codes each: to owners 2 of 3 others are remote, in chunks of 1,024; by nodes one, in chunks of 1,024."""
    sent = results[0]["bytes_to_other_nodes"]
    assert sent["flat, scatter"] == 2 * 1024
    assert sent["by nodes, scatter"] == 1024
    assert sent["by nodes, gather"] < sent["flat, gather"] * 0.6


def test_training_by_nodes_follows_plain_training(results: list[dict[str, Any]]) -> None:
    for found, wanted in zip(results[0]["training"], results[0]["plain_training"], strict=True):
        assert not torch.equal(found, wanted)
        assert (found - wanted).norm() < 2e-3 * wanted.norm()


def test_ranks_that_are_no_whole_nodes_are_refused(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["refused"].startswith("group_size=3 does not divide 4 ranks, ")
