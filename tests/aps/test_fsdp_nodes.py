"""FSDP2 on 2 nodes of 2 ranks: gradients added inside of nodes before they leave them, parameters that enter once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from aps_ranks import message_of, run_ranks, several
from aps_reference import rows_of, sum_of_codes
from fsdp_training import WIDTH, Training, by_bits, check_bits, links, plan_of
from torch import Tensor

from fxprec.aps import APSReduceScatter, APSState, LinkPlan
from fxprec.runtime.aps.by_link import MEASURED, PERIOD
from fxprec.runtime.aps.gathers import EIGHT_BITS, FOUR_BITS
from fxprec.runtime.aps.link_problem import MESSAGE_BYTES
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.predict import Link
from fxprec.runtime.aps.shards import Shards

WORLD, NODE = 4, 2
LAYERS = (5, 0, 12, 7)
DIFFERENCES = {"parameters": FOUR_BITS, "exact_every": 100}
SLOW = Links(Link(1e5, 1e-4), Link(1e9, 1e-5), NODE)
ALIKE = Links(Link(1e12, 1e-6), Link(1e12, 1e-2), NODE)


@contextmanager
def bytes_sent(groups: dict[str, list[dist.ProcessGroup]]) -> Iterator[dict[str, int]]:
    """Count the bytes that this rank sends to others by all-to-all and all-gather, by the kind of group."""
    found = dict.fromkeys([*groups, "others"], 0)

    def note(group: dist.ProcessGroup, size: float) -> None:
        kind = next((kind for kind, members in groups.items() if any(group is g for g in members)), "others")
        found[kind] += round(size)

    real, gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def to_all(out: Tensor, rows: Tensor, **kwargs: Any) -> Any:
        world = dist.get_world_size(kwargs["group"])
        note(kwargs["group"], rows.nbytes * (world - 1) / world)
        return real(out, rows, **kwargs)

    def gathered(out: Tensor, message: Tensor, **kwargs: Any) -> Any:
        note(kwargs["group"], message.nbytes * (dist.get_world_size(kwargs["group"]) - 1))
        return gather(out, message, **kwargs)

    with (
        mock.patch.object(dist, "all_to_all_single", to_all),
        mock.patch("fxprec.runtime.aps.exchange.all_gather_into", gathered),
    ):
        yield found


def kinds(state: APSState) -> dict[str, list[dist.ProcessGroup]]:
    node = state.groups.node
    between = node.between
    return {"between": [between.payload, between.gather, between.exponents], "inside": [node.scatter, node.gather]}


def raw(rank: int, world: int) -> dict[str, Tensor]:
    """This rank's sum, by case."""
    found = {}
    for case in ("plain", "zero-layer", "nan"):
        scatter = APSReduceScatter(APSState("1-4-3", group_size=NODE), Shards(sizes=LAYERS))
        found[case] = torch.empty(sum(LAYERS))
        scatter(found[case], rows_of(rank, WORLD, LAYERS, case).reshape(-1), dist.group.WORLD, dist.ReduceOp.SUM)
    return found


def outputs(training: Training) -> Tensor:
    """A forward pass, and another after all weights have changed."""
    x, found = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3)), []
    with torch.no_grad():
        for _ in range(2):
            found.append(training.model(x))
            training.model.reshard()
            for parameter in training.model.parameters():
                parameter.to_local().mul_(1.001)
    return torch.cat(found)


def gathered(rank: int, world: int) -> dict[str, Any]:
    """By way of gathering: whether nodes change what a model computes, a rank's elements, and the bytes it sends."""
    found: dict[str, Any] = {}
    by_link = {"parameters": "by link", "bits": "by link"}
    for name, options, of_nodes in (
        ("whole", by_link | {"link": "1Gbit/s"}, by_link | {"link": "1Gbit/s between; 1Gbit/s inside"}),
        ("8 bits", {"parameters": EIGHT_BITS}, {"parameters": EIGHT_BITS}),
        ("differences", DIFFERENCES, DIFFERENCES),
    ):
        alike, nodes = Training(rank, **options), Training(rank, **of_nodes, group_size=NODE)
        shard = nodes.shards().numel()
        with bytes_sent(kinds(nodes.state)) as sent:
            got = outputs(nodes)
        found[name] = {"equal": torch.equal(got, outputs(alike)), "sent": sent, "shard": shard}
    return found


def planned(rank: int, world: int) -> dict[str, Any]:
    """The ways on a slow link between nodes, where all are alike, and as it was; the bytes of a step of the first."""
    found: dict[str, Any] = {"ways": []}
    with links(SLOW, ALIKE, SLOW):
        training = Training(rank, group_size=NODE, bits="by link", parameters="by link").step(MEASURED + 2)
        with bytes_sent(kinds(training.state)) as sent:
            training.backward()
        found |= {"sent": sent, "plan": training.plan.to_dict()}
        for _ in range(3):
            found["ways"].append(training.plan.ways["2.weight"])
            training.step(PERIOD)
    return found | {"weights": training.shards()}


def in_bits(rank: int, world: int) -> dict[int, Any]:
    """By bits: the error of each gradient that goes by nodes against FSDP2's own, and NaNs from one rank's input."""

    def plan(training: Training, bits: int) -> LinkPlan:
        found = plan_of(training, bits, 32)
        by_nodes = tuple(replace(layer, by_nodes=True) for layer in found.layers)
        return replace(found, layers=by_nodes, node=NODE, inside=Link(1e9, 0.0))

    return by_bits(rank, plan, group_size=NODE, link="1Mbit/s between; 1Gbit/s inside")


def resumed(rank: int, world: int) -> bool:
    """Whether a run that is saved after 8 steps goes on elsewhere as it would have."""
    options = {"bits": "by link", "link": "1Mbit/s, 1ms between; 1Gbit/s inside", "parameters": "by link"}
    options |= {"rounding": "stochastic", "group_size": NODE, "exact_every": 50}
    whole = Training(rank, **options).step(8)
    again = Training(rank, **options)
    again.state.load_state_dict(whole.state.state_dict())
    again.model.load_state_dict({k: v.clone() for k, v in whole.model.state_dict().items()})
    again.at = 8
    assert whole.plan.ways["2.weight"] == "4 bits by nodes"
    assert {row.bits for row in whole.plan.gathered} == {4}
    return torch.equal(whole.step(3).shards(), again.step(3).shards())


def refused(rank: int, world: int) -> str:
    """What nodes of another group than FSDP2's end in."""
    part = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    return message_of(lambda: Training(rank, group_size=1, process_group=part, bits="by link").step())


CHECKS = (raw, gathered, planned, in_bits, resumed, refused)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("fsdp_nodes", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


@pytest.mark.parametrize("case", ["plain", "zero-layer", "nan"])
def test_the_sum_is_that_of_the_definition(results: list[dict[str, Any]], case: str) -> None:
    """Ranks of a node are added as bf16 in float32; the nodes' sums share a scale for each layer of each shard."""
    of_nodes = []
    for node in range(WORLD // NODE):
        of_ranks = [rows_of(node * NODE + k, WORLD, LAYERS, case).bfloat16().float() for k in range(NODE)]
        of_nodes.append((of_ranks[0] + of_ranks[1]).numpy())
    for rank, found in enumerate(r["raw"][case] for r in results):
        for got, layer in zip(found.split(list(LAYERS)), np.cumsum(LAYERS), strict=True):
            parts = [rows[rank, layer - len(got) : layer] for rows in of_nodes]
            np.testing.assert_array_equal(got.numpy(), sum_of_codes(parts, "1-4-3"))


def test_gathers_by_nodes_give_the_same_weights_and_enter_a_node_once(results: list[dict[str, Any]]) -> None:
    """A rank sends its shard to its counterpart, and then both nodes' shards inside."""
    for rank in results:
        for name, found in rank["gathered"].items():
            assert found["equal"], name
            assert found["sent"]["inside"] == 2 * found["sent"]["between"], name
        whole, coded = (rank["gathered"][name]["sent"]["between"] for name in ("whole", "8 bits"))
        assert whole >= 2 * 4 * rank["gathered"]["whole"]["shard"]
        assert coded / whole < 0.27


def test_the_plan_follows_both_links_and_counts_what_leaves_a_node(results: list[dict[str, Any]]) -> None:
    found = results[0]["planned"]
    assert found["ways"] == ["4 bits by nodes", "32 bits", "4 bits by nodes"]
    for rank in results:
        sent, plan = rank["planned"]["sent"], LinkPlan.from_dict(rank["planned"]["plan"])
        assert plan.to_dict() == found["plan"]
        gathered_between = plan.bytes_gathered / (WORLD - 1) * 2  # both passes
        codes = sent["between"] - gathered_between
        assert codes * NODE == pytest.approx(plan.bytes_between, rel=0.03)
        inside = sent["inside"] - 2 * gathered_between
        assert codes + inside == pytest.approx(plan.bytes_sent - 4 * 2 * MESSAGE_BYTES, rel=0.03)


def test_gradients_by_nodes_are_fsdps_but_for_roundings_in_each_width(results: list[dict[str, Any]]) -> None:
    """16 bits are rounded twice: each rank's gradient, and the sums of nodes."""
    for rank in results:
        check_bits(rank["in_bits"], {32: (0, 1e-6), 16: (2**-11, 2**-7), 8: (2**-7, 2**-4), 4: (2**-5, 2**-2)})


def test_a_run_goes_on_bit_for_bit(results: list[dict[str, Any]]) -> None:
    assert all(rank["resumed"] for rank in results)


def test_nodes_of_another_group_are_refused(results: list[dict[str, Any]]) -> None:
    assert all("plans for 2 ranks and FSDP2 shards over 4" in rank["refused"] for rank in results)
