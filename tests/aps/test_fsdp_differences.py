"""FSDP2 on three ranks whose parameters are gathered as differences from what all ranks already have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from aps_ranks import message_of, run_ranks, several
from fsdp_training import WIDTH, Mixed, Training, bytes_gathered, links, plan_of, weights_seen
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fxprec.aps import APSState, LinkPlan, use_aps
from fxprec.numerics import block_codec
from fxprec.runtime.aps import differences
from fxprec.runtime.aps.by_link import MEASURED
from fxprec.runtime.aps.differences import MOST_LOST
from fxprec.runtime.aps.gathers import FOUR_BITS
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.predict import Link

WORLD = 3
EVERY, SELDOM = 4, 16
IN_CODES = {"parameters": FOUR_BITS, "exact_every": EVERY}
ROWS = -(-WIDTH // WORLD)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor().detach().clone()


def moved(local: Tensor, by: float, seed: int) -> None:
    local.add_(by * torch.randn(local.shape, generator=torch.Generator().manual_seed(seed)))


def followed(rank: int, world: int) -> dict[str, Any]:
    """Of 10 steps: a layer's exact weight, its shard, what both passes see, and the bytes that each pass gathers."""
    training = Training(rank, **IN_CODES)
    weight = training.model[2].weight
    found: dict[str, Any] = {"exact": [], "local": [], "bytes": []}
    with weights_seen(training.model[2]) as seen:
        for _ in range(10):
            found["exact"].append(whole(weight))
            found["local"].append(weight.to_local().detach().clone())
            with bytes_gathered() as sizes:
                training.model(torch.ones(1, WIDTH)).sum().backward()
            found["bytes"].append(sizes)
            training.optimizer.zero_grad()
            with torch.no_grad():
                moved(weight.to_local(), 1e-3, seed=10 * len(found["bytes"]) + rank)
    return found | {"seen": seen}


def changed(rank: int, world: int) -> dict[str, Any]:
    """What a layer sees after its weights were all written anew, with a NaN on one rank, and after it."""
    training = Training(rank, **IN_CODES | {"exact_every": 1000})
    weight, found = training.model[2].weight, {}
    x = torch.ones(1, WIDTH)
    with weights_seen(training.model[2]) as seen, torch.no_grad():
        training.model(x)
        for name, write in (
            (
                "anew",
                lambda local: local.copy_(torch.randn(local.shape, generator=torch.Generator().manual_seed(rank))),
            ),
            ("nan", lambda local: local[0, :1].fill_(torch.nan if rank == 1 else 0.5)),
            ("well", lambda local: local[0, :1].fill_(0.25)),
        ):
            write(weight.to_local())
            training.model(x)
            found[name] = {"exact": whole(weight), "seen": seen["forward"][-1]}
        weight.to_local().add_(1e-4)
        training.model(x)
        found["a little"] = {"exact": whole(weight), "seen": seen["forward"][-1]}
    return found


def mixed(rank: int, world: int) -> dict[str, Any]:
    """The same for parameters of two dtypes, one of them not aligned: what is seen, and what is stored."""
    model = Mixed()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    use_aps(model, APSState("e4m3fn"), **IN_CODES)
    found = []
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        found.append((model.seen, [whole(p) for p in model.parameters()]))
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().mul_(1.01)
    return {"found": found}


def resumed(rank: int, world: int) -> dict[str, Any]:
    """Whether a run saved after 6 steps goes on as it would have, loaded before and after `use_aps`; and what is saved."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = Training(rank, policy=policy, **IN_CODES).step(6)
    state, weights = run.state.state_dict(), {k: v.clone() for k, v in run.model.state_dict().items()}
    again = Training(rank, policy=policy, **IN_CODES)
    again.state.load_state_dict(state)
    saved_again = again.state.state_dict()["differences"]["2"]
    again.model.load_state_dict(weights)
    again.at = 6
    anew = Training(rank, policy=policy, **IN_CODES)
    anew.model.load_state_dict(weights)
    anew.at = 6
    flats = [t.step(5).shards() for t in (run, again, anew)]
    kept = state["differences"]
    return {
        "same": torch.equal(flats[0], flats[1]),
        "matters": not torch.equal(flats[0], flats[2]),
        "saved again": torch.equal(saved_again["own"], kept["2"]["own"]) and saved_again["age"] == kept["2"]["age"],
        "names": sorted(kept),
        "bytes": kept["2"]["own"].nbytes,
        "age": kept["2"]["age"],
    }


def planned(rank: int, world: int) -> dict[str, Any]:
    """The plan of a slow link, and the bytes of its gathers over some steps."""
    with links(Links(Link(1e5, 1e-4))):
        training = Training(rank, bits="by link", parameters="by link", exact_every=SELDOM).step(MEASURED + 2)
        with bytes_gathered() as sizes:
            training.step(SELDOM)
    return {"plan": training.plan.to_dict(), "bytes": sum(sizes) / SELDOM}


def trained(rank: int, world: int) -> dict[str, list[float]]:
    """Losses of 30 steps with exact gathers, and with differences."""
    found: dict[str, list[float]] = {}
    for name, training in (("exact", Training(rank, high_steps=100)), ("coded", Training(rank, **IN_CODES))):
        found[name], training.optimizer.param_groups[0]["lr"] = [], 0.3
        for _ in range(30):
            found[name].append(training.backward())
            training.optimizer.step()
    return found


def evaluated(rank: int, world: int) -> bool:
    """Whether evaluations between steps, some of them gathering exactly, may run in inference mode as without."""
    x, found = torch.ones(1, WIDTH), []
    for mode in (torch.inference_mode, torch.no_grad):
        training = Training(rank, **IN_CODES)
        for _ in range(5):
            training.step()
            with mode():
                training.model(x)
            training.model.reshard()
        found.append(training.shards())
    return torch.equal(*found)


def refused(rank: int, world: int) -> dict[str, str]:
    options = {"bits": "by link", "link": "1Mbit/s", "parameters": "by link"}
    saved = Training(rank, **IN_CODES).step(2).state.state_dict()
    late = Training(rank, **IN_CODES)
    if rank != 2:
        late.state.load_state_dict(saved)
    plain = Training(rank, **options)
    four = plan_of(plain, 16, 4)
    return {
        "late": message_of(late.step),
        "no gathers": message_of(lambda: Training(rank, exact_every=EVERY)),
        "one": message_of(lambda: Training(rank, **IN_CODES | {"exact_every": 1})),
        "differ": message_of(lambda: Training(rank, **IN_CODES | {"exact_every": EVERY + (rank == 1)})),
        "plan": message_of(lambda: Training(rank, **options, plan=four)),
        "same plan": message_of(lambda: Training(rank, **options, exact_every=SELDOM, plan=four)),
    }


CHECKS = (followed, changed, mixed, resumed, planned, trained, evaluated, refused)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("fsdp_differences", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


def coded(x: Tensor) -> Tensor:
    """A shard's values (elements,) as they are decoded, filled up to whole blocks and a whole shard of `ROWS` rows."""
    padded = torch.cat([x, x.new_zeros(ROWS * WIDTH - x.numel() + -ROWS * WIDTH % 64)])
    codes = block_codec.stored(padded, None, None, 0, FOUR_BITS)
    return block_codec.loaded(codes, None, 0, FOUR_BITS, len(padded), torch.float32)[: x.numel()]


def test_weights_are_the_sum_of_coded_differences_and_every_fourth_gather_is_exact(
    results: list[dict[str, Any]],
) -> None:
    kept = [torch.empty(0)] * WORLD
    for k in range(10):
        locals_ = [rank["followed"]["local"][k].flatten() for rank in results]
        kept = [
            local if k % EVERY == 0 else have + coded(local - have) for have, local in zip(kept, locals_, strict=True)
        ]
        wanted, exact = torch.cat(kept).view(WIDTH, WIDTH), results[0]["followed"]["exact"][k]
        for rank in results:
            assert torch.equal(rank["followed"]["seen"]["forward"][k], wanted)
        assert torch.equal(wanted, exact) == (k % EVERY == 0)


def test_errors_of_differences_do_not_add_up(results: list[dict[str, Any]]) -> None:
    found = results[0]["followed"]
    exact, seen = found["exact"], found["seen"]["forward"]
    step = (exact[1] - exact[0]).norm()
    errors = [float((s - e).norm() / step) for s, e in zip(seen, exact, strict=True)]
    assert 0.05 < errors[1] < 0.15
    assert errors[3] < 1.2 * errors[1]


def test_the_backward_pass_sees_the_forward_pass_s_weights_and_gathers_nothing(results: list[dict[str, Any]]) -> None:
    matrix, bias = -(-ROWS * WIDTH // 64) * 36, ROWS * 4
    root = -(-3 * WIDTH // 64) * 36 + 3 * 4 + 1
    for rank in results:
        found = rank["followed"]
        assert all(torch.equal(a, b) for a, b in zip(found["seen"]["forward"], found["seen"]["backward"], strict=True))
        whole_layer = ROWS * WIDTH * 4 + bias
        for k, sizes in enumerate(found["bytes"]):
            sent = [3 * WIDTH * 4 + 3 * 4, *[whole_layer] * 3] if k % EVERY == 0 else [root, *[matrix + bias + 1] * 3]
            assert sizes == sent, k


def test_a_difference_that_loses_more_than_8_bits_is_not_used(results: list[dict[str, Any]]) -> None:
    """All weights written anew, a weight that is NaN, and one that was: each is gathered as it is."""
    for rank in results:
        found = rank["changed"]
        for name in ("anew", "nan", "well"):
            assert torch.equal(found[name]["seen"].nan_to_num(7.0), found[name]["exact"].nan_to_num(7.0)), name
        assert found["nan"]["seen"].isnan().sum() == 1
        little = found["a little"]
        lost = (little["seen"] - little["exact"]).square().sum() / little["exact"].square().sum()
        assert 0 < lost < MOST_LOST


def test_parameters_of_several_dtypes_are_differences_each_in_its_own(results: list[dict[str, Any]]) -> None:
    for rank in results:
        (first, stored), *others = rank["mixed"]["found"]
        assert all(torch.equal(a, b) for a, b in zip(first, stored, strict=True))
        for seen, stored in others:
            *matrices, bias = zip(seen, stored, strict=True)
            assert torch.equal(*bias)
            for got, exact in matrices:
                assert got.dtype == exact.dtype
                assert 0 < (got.float() - exact.float()).norm() / exact.float().norm() < 2e-3


def test_a_run_goes_on_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["resumed"]
        assert found["same"]
        assert found["saved again"]
        assert found["matters"], "without what ranks keep the run would differ"
        assert found["names"] == ["0", "2", "3", "model"]
        assert found["bytes"] == (ROWS * WIDTH + ROWS) * 2
        assert found["age"] == 1


def test_a_plan_gathers_differences_over_a_slow_link_and_counts_their_bytes(results: list[dict[str, Any]]) -> None:
    for rank in results:
        data = rank["planned"]["plan"]
        plan = LinkPlan.from_dict(data)
        assert plan.to_dict() == data == results[0]["planned"]["plan"]
        assert {row.bits for row in plan.gathered} == {4}
        assert {row.name: row.bytes_kept for row in plan.gathered}["2"] == WORLD * 4 * (ROWS * WIDTH + ROWS)
        assert rank["planned"]["bytes"] * (WORLD - 1) == pytest.approx(plan.bytes_gathered, rel=1e-3)


def test_training_is_as_with_exact_gathers(results: list[dict[str, Any]]) -> None:
    for rank in results:
        exact, found = (torch.tensor(rank["trained"][name]) for name in ("exact", "coded"))
        assert (exact - found).abs().max() < 0.02
        assert exact[:5].mean() - exact[-5:].mean() > 0.1


def test_evaluation_in_inference_mode_may_gather_too(results: list[dict[str, Any]]) -> None:
    assert all(rank["evaluated"] for rank in results)


def test_what_ranks_cannot_do_together_is_refused_in_words(results: list[dict[str, Any]]) -> None:
    for rank in results:
        said = rank["refused"]
        assert "ranks would not gather alike: rank 0 has (parameters of " in said["late"]
        assert "step 1 after an exact gather), rank 2 has (parameters of " in said["late"]
        assert "anew); load the state of the same step on all" in said["late"]
        assert "exact_every=4 counts gathers in codes, and parameters=None gathers as FSDP2 does" in said["no gathers"]
        assert "exact_every" in said["one"]
        assert "use_aps differs between ranks" in said["differ"]
        assert "exact_every=5" in said["differ"]
        assert "in 4 bits; this model has no such module, or no such bits" in said["plan"]
        assert said["same plan"] == "no error"


def test_a_gather_of_other_ranks_is_exact() -> None:
    kept, ranks = differences.Differences(), mock.Mock(size=2)
    shard = torch.zeros(4, dtype=torch.uint8)
    assert kept.again(shard, ranks) is ranks.all_gather.return_value
