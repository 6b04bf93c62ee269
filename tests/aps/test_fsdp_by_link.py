"""FSDP2 on three ranks: parameters gathered in few bits, and bits of gradients and parameters by the link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from aps_ranks import message_of, run_ranks, several
from fsdp_training import (
    WIDTH,
    Mixed,
    Training,
    by_bits,
    bytes_gathered,
    check_bits,
    links,
    plan_of,
    weights_seen,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fxprec.aps import APSState, use_aps
from fxprec.errors import FxprecWarning
from fxprec.numerics import block_codec
from fxprec.numerics.blocks import find_blocks
from fxprec.runtime.aps.by_link import MEASURED, PERIOD
from fxprec.runtime.aps.fsdp_gather import APSAllGather
from fxprec.runtime.aps.gathers import EIGHT_BITS
from fxprec.runtime.aps.link_plan import LinkPlan
from fxprec.runtime.aps.link_problem import MESSAGE_BYTES
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.predict import Link
from fxprec.runtime.aps.shards import Shards

WORLD = 3
SLOW, FAST = Links(Link(1e5, 1e-4)), Links(Link(1e12, 1e-6))


def gathered(rank: int, world: int) -> dict[str, Any]:
    """By format: what a layer computes with, its shards, and the bytes of all messages; then those of plain bf16."""
    found: dict[str, Any] = {}
    for fmt in (EIGHT_BITS, "mxfp8_e4m3"):
        training = Training(rank, parameters=fmt)
        before = training.shards()
        local = training.model[2].weight.to_local().clone()
        with weights_seen(training.model[2]) as seen, bytes_gathered() as sizes:
            training.backward()
        bias = training.model[2].bias.full_tensor()
        found[fmt] = {"seen": seen, "local": local, "bias": bias, "bytes": sum(sizes)}
        found[fmt]["shards stay"] = torch.equal(before, training.shards())
    plain = Training(rank, parameters="by link", bits="by link", link="100Gbit/s")
    narrow = Training(
        rank,
        parameters=EIGHT_BITS,
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    for name, training in (("fp32", plain), ("coded bf16", narrow)):
        with bytes_gathered() as sizes:
            training.backward()
        found[name] = sum(sizes)
    found["narrow"] = float(narrow.gradients()["2.weight"].norm())
    return found


def mixed(rank: int, world: int) -> dict[str, Any]:
    """What a module with parameters of two dtypes computes with, what is stored, and the bytes of the message."""
    model = Mixed()
    stored = [p.detach().clone() for p in model.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    use_aps(model, APSState("e4m3fn"), parameters=EIGHT_BITS)
    with bytes_gathered() as sizes:
        model(torch.ones(2, WIDTH)).sum().backward()
    return {"seen": model.seen, "stored": stored, "bytes": sizes}


def planned(rank: int, world: int) -> dict[str, Any]:
    """Bits on a slow link, on a fast one, and on the slow one again; what a step sees whose bits change."""
    found: dict[str, Any] = {"bits": [], "gathered": []}
    with links(SLOW, FAST, SLOW):
        training = Training(rank, bits="by link", parameters="by link").step(MEASURED + 1)
        with weights_seen(training.model[0]) as seen:
            training.step(2)
        found["seen"] = seen
        for _ in range(3):
            found["bits"].append(training.plan.bits)
            found["gathered"].append({row.name: row.bits for row in training.plan.gathered})
            training.step(PERIOD)
    found["plan"] = training.plan.to_dict()
    found["events"] = [(e.kind, e.site) for e in training.state.by_link.events]
    scattered: list[int] = []
    real = dist.all_to_all_single

    def counted(out: Tensor, rows: Tensor, **kwargs: Any) -> Any:
        scattered.append(rows.nbytes)
        return real(out, rows, **kwargs)

    with bytes_gathered() as sizes, mock.patch.object(dist, "all_to_all_single", counted):
        training.backward()
    return found | {"bytes": sum(sizes), "scattered": sum(scattered)}


def in_bits(rank: int, world: int) -> dict[int, Any]:
    """By bits: the error of each gradient against FSDP2's own; and how many are NaN with a NaN on one rank."""
    return by_bits(rank, lambda training, bits: plan_of(training, bits, 32), link="1Mbit/s")


def resumed(rank: int, world: int) -> bool:
    """Whether a run that is saved after 8 steps goes on elsewhere as it would have."""
    options = {"bits": "by link", "link": "1Mbit/s, 1ms", "rounding": "stochastic", "parameters": "by link"}
    whole = Training(rank, **options).step(8)
    again = Training(rank, **options)
    again.state.load_state_dict(whole.state.state_dict())
    again.model.load_state_dict({k: v.clone() for k, v in whole.model.state_dict().items()})
    again.at = 8
    assert {row.bits for row in whole.plan.gathered} == {8}
    return torch.equal(whole.step(3).shards(), again.step(3).shards())


def refused(rank: int, world: int) -> dict[str, str]:
    """What a state of another step, another plan or other options ends in."""
    options = {"bits": "by link", "link": "1Mbit/s", "parameters": "by link"}
    saved = Training(rank, **options).step(6).state.state_dict()
    late = Training(rank, **options)
    if rank != 1:
        late.state.load_state_dict(saved)
    plan = LinkPlan.from_dict(saved["link_plan"])
    other = replace(plan, gathered=(replace(plan.gathered[0], elements=5), *plan.gathered[1:]))
    part = dist.new_group([rank], use_local_synchronization=True)
    return {
        "late": message_of(late.step),
        "plan": message_of(lambda: Training(rank, **options, plan=other)),
        "no gathers": message_of(lambda: Training(rank, bits="by link", link="1Mbit/s", plan=plan)),
        "differ": message_of(lambda: Training(rank, parameters=EIGHT_BITS if rank == 1 else "mxfp8_e4m3")),
        "format": message_of(lambda: Training(rank, parameters="e4m3fn")),
        "no plan": message_of(lambda: Training(rank, parameters="by link")),
        "ranks": message_of(lambda: Training(rank, bits="by link", process_group=part).step()),
    }


CHECKS = (gathered, mixed, planned, in_bits, resumed, refused)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("fsdp_by_link", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


@pytest.mark.parametrize("fmt", [EIGHT_BITS, "mxfp8_e4m3"])
def test_all_ranks_compute_with_the_same_rounded_weights_and_keep_exact_shards(
    results: list[dict[str, Any]], fmt: str
) -> None:
    """A rank's piece is coded by itself, filled up to whole blocks."""
    blocks = find_blocks(fmt)
    pieces = []
    for rank in results:
        local = rank["gathered"][fmt]["local"].flatten()
        rows = -(-WIDTH // WORLD)
        padded = torch.cat([local, local.new_zeros(rows * WIDTH - local.numel() + -rows * WIDTH % blocks.block)])
        read = block_codec.loaded(
            block_codec.stored(padded, None, None, 0, fmt), None, 0, fmt, len(padded), torch.float32
        )
        pieces.append(read[: local.numel()])
    wanted = torch.cat(pieces).view(WIDTH, WIDTH)
    for rank in results:
        found = rank["gathered"][fmt]
        assert found["shards stay"]
        assert len(found["seen"]["forward"]) == len(found["seen"]["backward"]) == 1
        for seen in (*found["seen"]["forward"], *found["seen"]["backward"]):
            assert torch.equal(seen, wanted)
    error = (wanted - torch.cat([r["gathered"][fmt]["local"].detach() for r in results])).norm() / wanted.norm()
    assert 1e-3 < error < (0.005 if fmt == EIGHT_BITS else 0.06)


def test_gathers_of_8_bits_send_at_most_055_of_bf16(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["gathered"]
        bf16 = found["fp32"] / 2
        for name in (EIGHT_BITS, "mxfp8_e4m3"):
            assert 0.5 < found[name]["bytes"] / bf16 < 0.55
        assert 0.5 < found["coded bf16"] / bf16 < 0.55
        assert found["narrow"] > 0


def test_parameters_of_several_dtypes_are_gathered_each_in_its_own(results: list[dict[str, Any]]) -> None:
    table, weight = -(-21 * 33 // 128) * 132, -(-86 * WIDTH // 128) * 132
    for rank in results:
        found = rank["mixed"]
        assert found["bytes"][0] == table + weight + 86 * 4
        *coded, bias = zip(found["seen"], found["stored"], strict=True)
        assert torch.equal(*bias)
        for seen, stored in coded:
            assert seen.dtype == stored.dtype
            assert 1e-4 < (seen - stored).norm() / stored.norm() < 0.01
        assert all(torch.equal(a, b) for a, b in zip(found["seen"], results[0]["mixed"]["seen"], strict=True))


def test_bits_of_gradients_and_parameters_follow_the_link(results: list[dict[str, Any]]) -> None:
    found = results[0]["planned"]
    names = {"model", "0", "2", "3"}
    assert [{bits[f"{k}.weight"] for k in (0, 2, 3)} for bits in found["bits"]] == [{4}, {32}, {4}]
    assert found["gathered"] == [dict.fromkeys(names, bits) for bits in (8, 32, 8)]
    assert set(found["events"]) == {("relinked", site) for site in found["bits"][0]} | {
        ("relinked", f"parameters of {name}") for name in names
    }
    assert all(rank["planned"]["plan"] == found["plan"] for rank in results)
    assert LinkPlan.from_dict(found["plan"]).to_dict() == found["plan"]


def test_the_plan_counts_the_bytes_of_a_gather(results: list[dict[str, Any]]) -> None:
    """The root stays whole between forward and backward; its bytes are 2 ranks times 7 blocks of 132, and a bias."""
    root = (WORLD - 1) * (7 * 132 + 3 * 4)
    for rank in results:
        found = rank["planned"]
        assert (WORLD - 1) * found["bytes"] == 2 * found["plan"]["bytes_gathered"] - root


def test_the_plan_counts_the_bytes_of_a_reduce_scatter(results: list[dict[str, Any]]) -> None:
    """A message a module and rank, and of each byte of codes what goes to other ranks."""
    for rank in results:
        found = rank["planned"]
        codes = found["plan"]["bytes_sent"] - 4 * (WORLD - 1) * MESSAGE_BYTES
        assert codes == pytest.approx(found["scattered"] * (WORLD - 1) / WORLD, rel=0.03)


def test_both_passes_of_a_step_see_the_same_weights_also_where_the_plan_changes(results: list[dict[str, Any]]) -> None:
    for rank in results:
        seen = rank["planned"]["seen"]
        for forward, backward in zip(seen["forward"], seen["backward"], strict=True):
            assert torch.equal(forward, backward)
        assert len(seen["forward"][0].unique()) > 2 * len(seen["forward"][1].unique()), "only the second is rounded"


def test_gradients_are_fsdps_but_for_one_rounding_in_each_width(results: list[dict[str, Any]]) -> None:
    for rank in results:
        check_bits(rank["in_bits"], {32: (0, 1e-6), 16: (2**-11, 2**-8), 8: (2**-7, 2**-4), 4: (2**-5, 2**-2)})


def test_a_run_goes_on_bit_for_bit(results: list[dict[str, Any]]) -> None:
    assert all(rank["resumed"] for rank in results)


def test_what_ranks_cannot_do_together_is_refused_in_words(results: list[dict[str, Any]]) -> None:
    for rank in results:
        said = rank["refused"]
        assert "ranks would not send alike: rank 0 has (step 6, link plan" in said["late"]
        assert "rank 1 has (step 0, no link plan); load the state of the same step on all" in said["late"]
        assert "link plan gathers 'model', 5 elements a rank, in 8 bits; this model has no such module" in said["plan"]
        assert "PlanError: link plan gathers parameters in few bits; pass parameters='by link'" in said["no gathers"]
        assert "use_aps differs between ranks: rank 0 has (parameters=mxfp8_e4m3, 4 modules)" in said["differ"]
        assert "FormatError: parameters='e4m3fn' has one scale for a whole shard" in said["format"]
        assert "needs a state with bits='by link'" in said["no plan"]
        assert "plans for 1 ranks and FSDP2 shards over 3" in said["ranks"]


def test_a_module_of_other_sizes_is_gathered_as_it_is_and_said() -> None:
    shards = Shards("block.0", 0, (torch.zeros(2, 2),), (4,))
    gather = APSAllGather(mock.Mock(spec=APSState), shards, None, nn.Linear(2, 2))
    assert [piece.size for piece in gather._pieces(torch.zeros(4))] == [16]
    with pytest.warns(FxprecWarning, match=r"gathers 12 bytes a rank of block.0, whose parameters had 16 when use_aps"):
        assert gather._pieces(torch.zeros(3)) == []
