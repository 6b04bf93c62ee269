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
from aps_buckets import SIZES, exchange, gradients_of, mean_of_ranks
from aps_ranks import run_ranks, several
from aps_reference import mean_of_layer, shared_exponent
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, LayerBits, LinkPlan, aps_hook
from fxprec.errors import ConfigError
from fxprec.runtime.aps import exchange as exchange_module
from fxprec.runtime.aps import groups, state
from fxprec.runtime.aps.predict import Link

WORLD, NODE, THREE_NODES = 4, 2, 6
FORMATS = ("e5m2", "e4m3fn", "1-2-1/256:e8m0", "dynamic-tree", "fp16")
CASES = ("plain", "zero-layer", "zero-on-one-rank", "denormal", "nan", "inf", "huge", "power")
BLOCKS = [("nan", FORMATS[2]), ("huge", FORMATS[2])]
PLAIN = [(case, bits) for case in ("plain", "nan") for bits in (16, 32)]
RUNS = [*(("plain", fmt) for fmt in FORMATS), *((case, "e5m2") for case in CASES[1:]), *BLOCKS]


def definitions(rank: int, world: int) -> list[Tensor]:
    with mock.patch.object(state, "make_groups", cache(groups.make_groups)):
        return [exchange(APSState(fmt, group_size=NODE), gradients_of(rank, case)) for case, fmt in RUNS]


def planned(model: nn.Module, ways: list[tuple[int, bool]], world: int) -> LinkPlan:
    """A plan of one bucket that sends each layer in so many bits, by nodes or not."""
    rows = zip(model.named_parameters(), ways, strict=True)
    layers = [LayerBits(n, 0, p.numel(), bits, 0.0, 0.0, by_nodes) for (n, p), (bits, by_nodes) in rows]
    node = {"node": NODE, "inside": Link(1e9)}
    return LinkPlan(world, 1e6, 0.0, 1 / 32, 0.0, (0.0,), 0.0, 0, tuple(layers), **node)


def plain(rank: int, world: int) -> list[Tensor]:
    """Layers that no format codes."""
    found = []
    model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in SIZES])
    for case, bits in PLAIN:
        plan = planned(model, [(bits, True)] * len(SIZES), world)
        aps = APSState("e5m2", bits="by link", model=model, plan=plan, group_size=NODE)
        found.append(exchange(aps, gradients_of(rank, case), list(model)))
    return found


def mixed(rank: int, world: int) -> tuple[Tensor, list[Tensor]]:
    """The mean of layers that go each its own way, and of each way by itself."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in SIZES])
    ways = [(8, True), (16, False), (16, True), (8, False), (4, True)]
    plans = [planned(model, each, world) for each in (ways, *([way] * len(SIZES) for way in ways))]
    states = [APSState("e5m2", bits="by link", model=model, plan=p, group_size=NODE) for p in plans]
    whole, *alone = (exchange(aps, gradients_of(rank), list(model)) for aps in states)
    return whole, alone


def fed_back(rank: int, world: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The sums over 30 steps of means of the same gradients, with error feedback; and the exact ones."""
    found = {}
    owners = [nn.Parameter(torch.zeros(n)) for n in SIZES]
    for fmt in ("e5m2", "1-2-1/256:e8m0"):
        for feedback in (True, False):
            aps = APSState(fmt, group_size=NODE, error_feedback=feedback)
            total = sum(exchange(aps, gradients_of(rank), owners) for _ in range(30))
            found[f"{fmt}, {feedback}"] = (total / 30, mean_of_ranks(list(range(world))))
    return found


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
            mock.patch.object(exchange_module, "DIRECT_BYTES", -1),  # gathers are no all-to-alls then
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


CHECKS = (definitions, plain, mixed, fed_back, random, refused, bytes_to_other_nodes, training, plain_training)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("nodes", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def means_of_nodes(layer: list[np.ndarray], *, rounds: bool = True) -> list[np.ndarray]:
    """Each node's mean of its ranks' gradients of a layer, which are sent in bf16."""
    sent = [bf16(g) if rounds else g for g in layer]
    return [
        (sum(sent[k + 1 : k + NODE], sent[k]) / np.float32(NODE)).astype(np.float32) for k in range(0, len(layer), NODE)
    ]


def mean_by_nodes(case: str, fmt: str, world: int) -> list[np.ndarray]:
    """The definition: by chunk the mean of nodes' means in codes, scaled by all ranks' exponent; the mean in bf16.

    Of two nodes each adds both nodes' codes, of more an owner adds them and sends codes of the sum.
    """
    ranks = [[g.numpy() for g in gradients_of(r, case)] for r in range(world)]
    chunk = -(-sum(SIZES) // NODE)
    found, at = [], 0
    for k, size in enumerate(SIZES):
        layer = [rank[k] for rank in ranks]
        cuts = [c - at for c in range(0, sum(SIZES), chunk) if at < c < at + size]
        with np.errstate(all="ignore"):
            whole = np.full(size, np.nan, np.float32)
            if all(np.isfinite(bf16(g)).all() for g in layer) and not (case == "huge" and "/" in fmt and k == 0):
                parts = zip(*(np.split(n, cuts) for n in means_of_nodes(layer)), strict=True)
                scaled_by = None if size == 0 else shared_exponent([bf16(g) for g in layer], 1)
                options = {"format": fmt, "exponent": scaled_by, "rounds_sum": world > 2 * NODE}
                owners = np.arange(at, at + size) % chunk // -(-chunk * NODE // world)
                owned = zip(parts, np.split(owners, cuts), strict=True)
                means = [mean_of_layer(list(p), owner, options) for p, owner in owned]
                whole = bf16(np.concatenate(means))
        found.append(whole)
        at += size
    return found


@pytest.mark.parametrize("k", range(len(RUNS)), ids=[f"{case}, {fmt}" for case, fmt in RUNS])
def test_the_mean_is_that_of_the_definition(results: list[dict[str, Any]], k: int) -> None:
    """One rank's inf, NaN, number that bf16 does not hold, or one whose rotation overflows makes its whole layer NaN."""
    found = results[0]["definitions"][k].split(list(SIZES))
    for a, b in zip(found, mean_by_nodes(*RUNS[k], WORLD), strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


def test_three_nodes_send_their_codes_to_owners(once: Callable[..., Any]) -> None:
    ranks = once("three_nodes", lambda: run_ranks(THREE_NODES, several, [(definitions, ())]))
    for k, run in enumerate(RUNS):
        found = [rank["definitions"][k] for rank in ranks]
        for a, b in zip(found[0].split(list(SIZES)), mean_by_nodes(*run, THREE_NODES), strict=True):
            np.testing.assert_array_equal(a.numpy(), b)
        assert all(torch.equal(other.view(torch.int32), found[0].view(torch.int32)) for other in found)


@pytest.mark.parametrize("k", range(len(PLAIN)), ids=[f"{case}, {bits} bits" for case, bits in PLAIN])
def test_16_and_32_bits_add_what_nodes_have_added(results: list[dict[str, Any]], k: int) -> None:
    case, bits = PLAIN[k]
    sent = bf16 if bits == 16 else np.asarray
    ranks = [[g.numpy() for g in gradients_of(r, case)] for r in range(WORLD)]
    with np.errstate(invalid="ignore"):
        for layer, found in zip(zip(*ranks, strict=True), results[0]["plain"][k].split(list(SIZES)), strict=True):
            first, second = (sent(n) for n in means_of_nodes(list(layer), rounds=bits == 16))
            np.testing.assert_array_equal(found.numpy(), sent(sent(first + second) / np.float32(2)))


def test_layers_of_one_bucket_go_each_its_own_way(results: list[dict[str, Any]]) -> None:
    """8 bits scale a layer as a whole, so its mean is that of the layer alone but for the second scale of a piece."""
    whole, alone = results[0]["mixed"]
    for k, (found, *ways) in enumerate(zip(*(flat.split(list(SIZES)) for flat in (whole, *alone)), strict=True)):
        assert (found - ways[k]).norm() <= (0.3 if k == 4 else 0.05) * ways[k].norm(), "4 bits draw other signs"
        assert not any((found - other).norm() == 0 for j, other in enumerate(ways) if j != k and found.numel() > 1)


@pytest.mark.parametrize("fmt", ["e5m2", "1-2-1/256:e8m0"])
def test_error_feedback_pays_what_chunks_have_lost(results: list[dict[str, Any]], fmt: str) -> None:
    for rank in results:
        errors = []
        for feedback in (True, False):
            found, exact = rank["fed_back"][f"{fmt}, {feedback}"]
            pairs = zip(found.split(list(SIZES)), exact.split(list(SIZES)), strict=True)
            errors.append([float((a - b).norm() / b.norm()) for a, b in pairs if len(b) > 1])
        assert all(fed < 0.2 * plain for fed, plain in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("what", ["definitions", "plain", "random", "training"])
def test_all_ranks_get_the_same_bits(results: list[dict[str, Any]], what: str) -> None:
    first, *others = results
    for rank in others:
        for found, wanted in zip(rank[what], first[what], strict=True):
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_random_rounding_differs_from_step_to_step(results: list[dict[str, Any]]) -> None:
    first, second, _ = results[0]["random"]
    assert not torch.equal(first, second)


def test_a_node_sends_others_half_the_codes(results: list[dict[str, Any]]) -> None:
    """Of 4,096 codes: both of an owner's two remote ones get 1,024, twice; by nodes one gets a chunk of 2,048 once."""
    sent = results[0]["bytes_to_other_nodes"]
    assert sent["flat, scatter"] == 2 * 1024
    assert sent["flat, gather"] > 2 * 1024
    assert sent["by nodes, scatter"] == 0
    assert sent["by nodes, gather"] == 2048


def test_training_by_nodes_follows_plain_training(results: list[dict[str, Any]]) -> None:
    for found, wanted in zip(results[0]["training"], results[0]["plain_training"], strict=True):
        assert not torch.equal(found, wanted)
        assert (found - wanted).norm() < 2e-3 * wanted.norm()


def test_ranks_that_are_no_whole_nodes_are_refused(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["refused"].startswith("group_size=3 does not divide 4 ranks, ")
