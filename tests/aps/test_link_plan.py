"""The plan file of a link: it comes back as it was, hostile ones are refused in a line, and `fxprec explain` reads it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import exit_code
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.errors import PlanError
from fxprec.runtime.aps.link_plan import BITS, GatheredBits, LayerBits, LinkPlan
from fxprec.runtime.aps.predict import Link

PLAN = LinkPlan(
    ranks=4,
    bytes_per_second=25e6,
    latency=0.001,
    budget=1 / 32,
    error=0.004,
    ready=(0.0, 0.02),
    end=0.05,
    bytes_sent=2_500_000,
    layers=(LayerBits("head.weight", 0, 1000, 16, 0.0, 1e-7), LayerBits("body.weight", 1, 3000, 4, 0.002, 0.004)),
)
SHARDED = replace(PLAN, gathered=(GatheredBits("head", 250, 32), GatheredBits("body", 750, 8)), bytes_gathered=5_000)


def edited(**changes: Any) -> dict[str, Any]:
    data = json.loads(SHARDED.dumps())
    for path, value in changes.items():
        *keys, last = path.split("__")
        inner: Any = data
        for key in keys:
            inner = inner[int(key)] if key.isdecimal() else inner[key]
        inner[int(last) if last.isdecimal() else last] = value
    return data


def test_a_plan_comes_back_as_it_was_and_its_digest_is_of_all_of_it(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "link.json")
    assert LinkPlan.load(tmp_path / "link.json") == PLAN
    assert (tmp_path / "link.json").read_text() == PLAN.dumps()
    assert LinkPlan.from_dict(PLAN.to_dict() | {"layers": edited()["layers"], "ready": [0.0, 0.02]}) == PLAN
    assert LinkPlan.from_dict(edited()) == SHARDED
    of_earlier_version = {key: value for key, value in edited().items() if key != "bytes_kept"}
    assert LinkPlan.from_dict(of_earlier_version) == SHARDED
    digests = [LinkPlan.from_dict(d).digest for d in (edited(), edited(layers__1__bits=8), edited(gathered__0__bits=8))]
    assert len({PLAN.digest, *digests}) == 4
    assert PLAN.exposed == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers__0__bits": 5}, r"layers\[0\]\.bits: is 5; it must be one of 32, 16, 8, 4"),
        ({"layers__0__elements": -1}, r"layers\[0\]\.elements: is -1; it must be an int from 0"),
        ({"layers__1__name": "head.weight"}, "layers: name 'head.weight' twice; give each layer one line"),
        ({"gathered__1__name": "head"}, "gathered: name 'head' twice; give each layer one line"),
        ({"gathered__0__bits": 7}, r"gathered\[0\]\.bits: is 7; it must be one of 32, 16, 8, 4"),
        ({"layers__1__bucket": 7}, "layers: have buckets beyond the 2 entries of ready; plan again"),
        ({"bytes_per_second": 0}, "bytes_per_second: is 0; it must be a positive number"),
        ({"ranks": 1}, "ranks: is 1; it must be an int from 2"),
        ({"schema": 2}, "schema: is 2; it must be an int from 1 to 1"),
        ({"speed": 2}, "top level: has an unknown key 'speed'"),
        ({"node": 2}, "top level: has 4 ranks and nodes of 2, or no link inside of them; plan again"),
        ({"node": 3, "inside": {"bytes_per_second": 1.0, "latency": 0.0}}, "top level: has 4 ranks and nodes of 3"),
        ({"inside": {"bytes_per_second": 0, "latency": 0.0}}, "inside.bytes_per_second: is 0; it must be a positive"),
        ({"layers__0__by_nodes": True}, "layers: are exchanged by nodes, and node is 1; plan again"),
        ({"layers__0__by_nodes": 1}, r"layers\[0\]\.by_nodes: is 1; it must be true or false"),
        ({"layers__1__low_rank": 2}, "layers: are sent in low rank by nodes, or not in 16 bits; plan again"),
        ({"layers__0__low_rank": -1}, r"layers\[0\]\.low_rank: is -1; it must be an int from 0"),
    ],
)
def test_what_no_planner_wrote_is_refused_in_one_line(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "link.json").write_text(json.dumps(edited(**changes)))
    with pytest.raises(PlanError, match=said) as caught:
        LinkPlan.load(tmp_path / "link.json")
    assert str(caught.value).startswith(f"{tmp_path / 'link.json'}: ")
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)))
def test_any_value_in_any_place_is_read_or_refused(value: Any) -> None:
    for key in (
        *PLAN.to_dict(),
        "gathered__1",
        "layers__1__by_nodes",
        "layers__0",
        "layers__1__name",
        "layers__1__error",
    ):
        with suppress(PlanError):
            assert LinkPlan.from_dict(edited(**{key: value})).dumps()


def test_explain_says_bits_exposed_seconds_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PLAN.save(tmp_path / "link.json")
    assert exit_code("explain", str(tmp_path / "link.json")) == 0
    link, shares, *layers = capsys.readouterr().out.splitlines()
    assert link == "4 ranks, 200 Mbit/s, 1 ms: a rank sends 2.5 MB a step and ends 30 ms after the last gradient"
    assert shares.startswith("25% in 16 bits, 75% in 4 bits; adds 4.00e-03 of a gradient's squared norm, of 3.12e-02")
    assert layers[0] == "16 bits  head.weight: 1,000 elements, bucket 0, hidden behind backward, adds 1.00e-07"
    assert layers[1] == " 4 bits  body.weight: 3,000 elements, bucket 1, 2 ms exposed, adds 4.00e-03"
    assert exit_code("explain", str(tmp_path / "link.json"), "body.weight") == 0
    assert capsys.readouterr().out.splitlines()[2:] == [layers[1]]
    SHARDED.save(tmp_path / "sharded.json")
    assert exit_code("explain", str(tmp_path / "sharded.json")) == 0
    gathered = "to gather the parameters once, a rank sends 0.005 MB: head in 32 bits, body in 8 bits"
    assert capsys.readouterr().out.splitlines() == [link, shares, gathered, *layers]
    by_nodes = replace(PLAN.layers[1], by_nodes=True)
    nodes = replace(PLAN, node=2, inside=Link(2.5e8, 1e-4), bytes_between=900_000, layers=(PLAN.layers[0], by_nodes))
    nodes.save(tmp_path / "nodes.json")
    assert LinkPlan.load(tmp_path / "nodes.json") == nodes
    assert exit_code("explain", str(tmp_path / "nodes.json")) == 0
    where, between, shares, first, second = capsys.readouterr().out.splitlines()
    assert where.startswith(
        "4 ranks on 2 nodes, 2000 Mbit/s, 0.1 ms inside, 200 Mbit/s, 1 ms between: a rank sends 2.5 MB"
    )
    assert between == "a node sends to other nodes 0.9 MB a step"
    assert shares.startswith("25% in 16 bits, 75% in 4 bits by nodes; adds")
    assert (first, second) == (layers[0], layers[1].replace("4 bits", "4 bits by nodes"))
    assert exit_code("explain", str(tmp_path / "link.json"), "body.wieght") == 2
    assert "did you mean 'body.weight'" in capsys.readouterr().err
    assert set(BITS) >= {16, 8, 4}
