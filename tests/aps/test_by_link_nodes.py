"""Bits by link on 2 nodes of 2 ranks: one plan for both kinds of link, which is followed, kept, resumed and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from aps_ranks import run_ranks, several
from test_by_link import Training, links, message_of

from fxprec.aps import LinkPlan
from fxprec.errors import ConfigError
from fxprec.runtime.aps import by_link
from fxprec.runtime.aps.by_link import MEASURED, PERIOD
from fxprec.runtime.aps.links import Links, parse_links
from fxprec.runtime.aps.predict import Link

WORLD, NODE = 4, 2
INSIDE = Link(1e9, 1e-5)
SLOW, ALIKE = Links(Link(1e5, 1e-4), INSIDE, NODE), Links(Link(1e12, 1e-6), Link(1e8, 1e-2), NODE)


def relinked(rank: int, world: int) -> dict[str, Any]:
    """The ways on a slow link between nodes, where all links are alike, and as it was."""
    found = []
    with links(SLOW, ALIKE, SLOW), mock.patch.object(by_link, "TRIALS", 0):
        training = Training(rank, group_size=NODE).step(MEASURED + 2)
        for _ in range(3):
            found.append(training.plan.ways)
            training.step(PERIOD)
    events = [(e.step, e.kind, e.site, e.detail) for e in training.state.by_link.events]
    return {"ways": found, "events": events, "weights": training.flat(), "plan": training.plan.dumps()}


def measured(rank: int, world: int) -> dict[str, Any]:
    """Both links as they are here; what is tried; replicas after it."""
    training = Training(rank, group_size=NODE, error_feedback=True).step(MEASURED + 2)
    tried = []
    while training.state.by_link.is_trying:
        tried.append(sorted(set(training.plan.ways.values())))
        training.step()
    return {"plan": training.plan.dumps(), "tried": tried, "weights": training.flat()}


def resumed(rank: int, world: int) -> dict[str, Any]:
    """A run, and one that is saved after 8 steps and goes on elsewhere, with a budget that mixes ways."""
    options = {"link": "1Mbit/s between; 1Gbit/s inside", "group_size": NODE, "error_feedback": True}
    whole = Training(rank, **options).step(8)
    saved, at = whole.state.state_dict(), {k: v.clone() for k, v in whole.model.state_dict().items()}
    again = Training(rank, **options)
    again.ddp(torch.zeros(1, 512)).sum().backward()  # lets DDP build its buckets, as the whole run has
    again.state.load_state_dict(saved)
    again.model.load_state_dict(at)
    again.at = 8
    flats = [training.step(3).flat() for training in (whole, again)]
    return {"same": torch.equal(*flats), "ways": whole.plan.ways, "weights": flats[0]}


def with_a_nan(rank: int, world: int) -> list[int]:
    """NaNs of each layer's mean after a NaN of rank 3's in one element of each weight's gradient, in 4 bits by nodes."""
    options = {"link": "1Mbit/s between; 1Gbit/s inside", "group_size": NODE, "widths": (16, 4)}
    training = Training(rank, **options).step(MEASURED + 2)
    weights = [p for p in training.model.parameters() if p.dim() > 1]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt[0, 0] = torch.nan if rank == 3 else spoilt[0, 0]
        return spoilt

    handles = [weight.register_hook(spoil) for weight in weights[:2]]
    training.optimizer.step = lambda: None
    training.step()
    for handle in handles:
        handle.remove()
    return [int(weight.grad.isnan().sum()) for weight in weights]


def in_one_node(rank: int, world: int) -> tuple[int, list[str], float]:
    """A plan of ranks that are one node: its node, its ways, and its rate."""
    plan = Training(rank, link="1Mbit/s between; 8Mbit/s inside", group_size=world).step(MEASURED + 2).plan
    return plan.node, sorted(set(plan.ways.values())), plan.bytes_per_second


def refused(rank: int, world: int) -> dict[str, str]:
    plan = Training(rank, link="1Mbit/s between; 1Gbit/s inside", group_size=NODE).step(MEASURED + 2).plan
    return {
        "no nodes": message_of(lambda: Training(rank, plan=plan)),
        "other nodes": message_of(lambda: Training(rank, plan=replace(plan, node=4, inside=INSIDE), group_size=NODE)),
    }


CHECKS = (relinked, measured, resumed, with_a_nan, in_one_node, refused)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("by_link_nodes", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


@pytest.mark.parametrize("check", ["relinked", "measured", "resumed"])
def test_replicas_are_bit_identical(results: list[dict[str, Any]], check: str) -> None:
    for rank in results[1:]:
        assert torch.equal(rank[check]["weights"], results[0][check]["weights"])
        assert rank[check].get("plan") == results[0][check].get("plan")


def test_layers_go_by_nodes_while_the_link_between_is_slow(results: list[dict[str, Any]]) -> None:
    found = results[0]["relinked"]
    slow, alike, again = found["ways"]
    assert slow["0.weight"] == slow["2.weight"] == "4 bits by nodes"
    assert not any("by nodes" in way for way in alike.values())
    assert again["0.weight"] == "4 bits by nodes"
    step, kind, _, detail = next(e for e in found["events"] if e[2] == "0.weight")
    assert (step, kind) == (MEASURED + 1 + PERIOD, "relinked")
    assert detail == (
        f"4 bits by nodes to {alike['0.weight']}, link 0.8 Mbit/s between and 8000 Mbit/s inside of nodes to "
        "8e+06 Mbit/s between and 800 Mbit/s inside of nodes"
    )


def test_both_links_are_measured_and_ways_are_tried(results: list[dict[str, Any]]) -> None:
    found = results[0]["measured"]
    plan = LinkPlan.from_dict(json.loads(found["plan"]))
    assert (plan.node, plan.ranks) == (NODE, WORLD)
    assert 1e6 < plan.bytes_per_second < 1e11
    assert plan.inside is not None
    assert 1e6 < plan.inside.bytes_per_second < 1e11
    tried = {
        way.removesuffix(" by nodes") for ways in found["tried"] for way in ways
    }  # by nodes where that may be faster
    assert tried
    assert tried <= {"32 bits", "16 bits", "8 bits", "4 bits"}


def test_plan_and_residuals_resume_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["resumed"]["same"]
        assert "4 bits by nodes" in rank["resumed"]["ways"].values()


def test_one_ranks_nan_marks_its_whole_layer_and_no_other(results: list[dict[str, Any]]) -> None:
    """Each rank has a chunk of the layer, and a scale's exchange tells all of them."""
    for rank in results:
        assert rank["with_a_nan"] == [512 * 512, 512 * 512, 0]


def test_one_node_is_planned_as_ranks_that_are_all_alike(results: list[dict[str, Any]]) -> None:
    node, ways, rate = results[0]["in_one_node"]
    assert (node, rate) == (1, 1e6)
    assert not any("by nodes" in way for way in ways)


def test_a_plan_of_other_nodes_is_refused_in_words(results: list[dict[str, Any]]) -> None:
    for rank in results:
        said = rank["refused"]
        assert "link plan is for nodes of 2 ranks, and here nodes have 1; give group_size=2" in said["no nodes"]
        assert "link plan is for nodes of 4 ranks, and here nodes have 2" in said["other nodes"]


def test_links_are_read_in_either_order_and_one_kind_is_not_enough() -> None:
    wanted = Links(Link(6.25e6, 1e-3), Link(2.5e8), 2)
    assert parse_links("50Mbit/s, 1ms between; 2Gbit/s inside", 2) == wanted
    assert parse_links("2Gbit/s inside; 50Mbit/s, 1ms between", 2) == wanted
    assert parse_links("50Mbit/s, 1ms", None) == Links(Link(6.25e6, 1e-3))
    for text in ("50Mbit/s", "50Mbit/s between", "50Mbit/s between; 1Gbit/s between", "1Gbit/s inside; 1Gbit/s around"):
        with pytest.raises(ConfigError, match="must say both kinds of link of group_size=2"):
            parse_links(text, 2)
