"""Bits by link on three ranks: one plan, identical replicas, following the link, resuming, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from aps_buckets import exchange
from aps_ranks import message_of, run_ranks, several
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, LayerBits, aps_hook
from fxprec.errors import ConfigError
from fxprec.runtime.aps import by_link
from fxprec.runtime.aps.by_link import MEASURED, PERIOD
from fxprec.runtime.aps.link_plan import LinkPlan
from fxprec.runtime.aps.link_trial import AGAIN, TRIALS
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.predict import Link

WORLD = 3
SLOW, FAST = Links(Link(1e5, 1e-4)), Links(Link(1e12, 1e-6))


class Training:
    """A model of three layers in buckets of their own, its state, and its data, which `step` says."""

    def __init__(self, rank: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=1)
        self.state = APSState("e4m3fn", bits="by link", model=self.ddp, **options)
        self.ddp.register_comm_hook(self.state, aps_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.rank, self.at = rank, 0

    def step(self, count: int = 1, nan_on: int | None = None) -> Training:
        for _ in range(count):
            x = torch.randn(16, 512, generator=torch.Generator().manual_seed(100 * self.at + self.rank))
            x[0, 0] = torch.nan if nan_on == self.rank else x[0, 0]
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(x), x[:, :8].argmax(1)).backward()
            if nan_on is None:
                self.optimizer.step()
            self.at += 1
        return self

    @property
    def plan(self) -> LinkPlan:
        assert self.state.by_link is not None
        assert self.state.by_link.plan is not None
        return self.state.by_link.plan

    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@contextmanager
def links(*found: Links) -> Iterator[None]:
    """Let each probe find the next of these, the last one from then on."""
    left = list(found)
    with mock.patch.object(by_link, "probe_links", side_effect=lambda *_: left.pop(0) if len(left) > 1 else left[0]):
        yield


def measured(rank: int, world: int) -> dict[str, Any]:
    """A plan from the link as it is here, with error feedback, and replicas after it."""
    training = Training(rank, error_feedback=True).step(MEASURED + 1)
    unplanned = training.state.by_link.plan is None
    training.step(20)
    return {"unplanned": unplanned, "plan": training.plan.to_dict(), "weights": training.flat()}


def relinked(rank: int, world: int) -> dict[str, Any]:
    """The bits on a slow link, on a slightly other one, on a fast one, and on the slow one again."""
    found: list[dict[str, int]] = []
    with links(SLOW, Links(Link(1.1e5, 1e-4)), FAST, SLOW), mock.patch.object(by_link, "TRIALS", 0):
        training = Training(rank, widths=(16, 8, 4)).step(MEASURED + 2)
        for _ in range(4):
            found.append(training.plan.bits)
            training.step(PERIOD)
    events = training.state.by_link.events
    return {"bits": found, "events": [(e.step, e.kind, e.site, e.detail) for e in events], "weights": training.flat()}


def kept_high(rank: int, world: int) -> dict[str, Any]:
    """A module kept high stays out of the plan, and its gradient is the exact mean."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    state = APSState("e4m3fn", bits="by link", model=ddp, keep_high=["1"], link="1Mbit/s", widths=(16, 4))
    ddp.register_comm_hook(state, aps_hook)
    exact = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    exact.load_state_dict(ddp.state_dict())
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    for model in (ddp, exact):
        for _ in range(MEASURED + 2):
            model.zero_grad()
            model(x).square().sum().backward()
    pairs = zip(ddp.parameters(), exact.parameters(), strict=True)
    differences = [float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs]
    return {"layers": sorted(state.by_link.plan.bits), "differences": differences}


def tried(rank: int, world: int) -> dict[str, Any]:
    """Which widths the plans have that are tried in turn, and which stays if steps of 8 bits, or all, are the fastest."""
    found: dict[str, Any] = {}
    for name, fastest in (("8 bits", {8}), ("all alike", {4, 8, 16, 32})):
        with links(SLOW), mock.patch.object(by_link, "TRIED", torch.inf):
            training = Training(rank).step(MEASURED + 2)
            plans = training.state.by_link._trial.plans
            count = len(plans)
            seen = [set(training.plan.bits.values())]
            for _ in range(count * TRIALS - 1):
                seen.append(set(training.step().plan.bits.values()))
            times = [2.0 - (kinds <= fastest) for kinds in seen[:count]]
            seconds = {id(plan): time for plan, time in zip(plans, times, strict=True)}
            timed = mock.patch.object(
                by_link.Trial, "seconds", lambda trial, seconds=seconds: [seconds[id(p)] for p in trial.plans]
            )
            with timed:
                training.step()
                again = len(training.state.by_link._trial.plans) if training.state.by_link.is_trying else 0
                training.step(AGAIN * TRIALS * again)
            assert not training.state.by_link.is_trying
        chosen = sorted(set(training.plan.bits.values()))
        found[name] = {"seen": [sorted(k) for k in seen], "again": again, "chosen": chosen}
    return found


def resumed(rank: int, world: int) -> dict[str, Any]:
    """Weights of a run, and of one that is saved after 8 steps and goes on elsewhere; both rebuild buckets at once."""
    options = {"link": "1Mbit/s, 1ms", "error_feedback": True, "rounding": "stochastic"}
    whole = Training(rank, **options).step(8)
    state = whole.state.state_dict()
    weights = {k: v.clone() for k, v in whole.model.state_dict().items()}
    again = Training(rank, **options)
    again.ddp(torch.zeros(1, 512)).sum().backward()  # lets DDP build its buckets, as the whole run has
    again.state.load_state_dict(state)
    again.model.load_state_dict(weights)
    again.at = 8
    same_plan = again.plan == whole.plan
    forgetful = Training(rank, **options)
    forgetful.ddp(torch.zeros(1, 512)).sum().backward()
    forgetful.state.load_state_dict(state | {"residuals": {}})
    forgetful.model.load_state_dict(weights)
    forgetful.at = 8
    flats = [training.step(3).flat() for training in (whole, again, forgetful)]
    kept = sum(residual.nbytes for residual in state["residuals"].values())
    return {
        "plan": same_plan,
        "same": torch.equal(*flats[:2]),
        "feedback matters": not torch.equal(*flats[::2]),
        "counted": kept == whole.plan.bytes_kept > 0,
    }


def refused(rank: int, world: int) -> dict[str, str]:
    """What a state of another step, another plan or other options on one rank ends in."""
    saved = Training(rank, link="1Mbit/s").step(6).state.state_dict()
    late = Training(rank, link="1Mbit/s")
    if rank != 1:
        late.state.load_state_dict(saved)
    other = Training(rank, link="1Mbit/s")
    plan = LinkPlan.from_dict(saved["link_plan"])
    changed = replace(plan, layers=tuple(replace(r, bits=8 if rank == 2 else r.bits) for r in plan.layers))
    other.state.load_state_dict(saved | {"link_plan": changed.to_dict()})
    wrong = replace(plan, layers=(replace(plan.layers[0], name="4.wieght"), *plan.layers[1:]))
    return {
        "block format": message_of(lambda: APSState("1-2-1/256:e8m0", accumulate="format")),
        "no model": message_of(lambda: APSState("e4m3fn", bits="by link")),
        "late": message_of(late.step),
        "other plan": message_of(other.step),
        "rates": message_of(lambda: Training(rank, link=f"{rank + 1}Mbit/s")),
        "name": message_of(lambda: Training(rank, plan=wrong)),
        "ranks": message_of(lambda: Training(rank, plan=replace(plan, ranks=8))),
        "weights": message_of(lambda: Training(rank, weights={"conv*": 2.0})),
    }


def not_finite(rank: int, world: int) -> dict[str, Any]:
    """A NaN on one rank in the step of the statistics, and in one after: the same on all ranks, and training goes on."""
    training = Training(rank, link="1Mbit/s").step(MEASURED)
    training.step(nan_on=1)
    gradients = torch.cat([p.grad.flatten() for p in training.model.parameters()])
    training.step()
    delayed = training.state.by_link.plan is None
    training.step(MEASURED + 1)
    plan = training.plan
    training.step(nan_on=2)
    later = torch.cat([p.grad.flatten() for p in training.model.parameters()])
    training.optimizer.zero_grad()
    training.step(2)
    nans = gradients.isnan().sum().item(), later.isnan().sum().item()
    return {"delayed": delayed, "bits": plan.bits, "nans": nans, "weights": training.flat()}


def in_16_bits(rank: int, world: int) -> dict[str, Any]:
    """Layers of 16 bits beside one of 16 and of 8 in their bucket: what comes back, what is owed, the exact sum."""
    found: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(40, 20), nn.Linear(20, 8))
    names, parameters = zip(*model.named_parameters(), strict=True)
    g = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(p.shape, generator=g).flatten() for p in parameters]
    owed = torch.cat([v + (0.5 if k == 0 else 0.0) for k, v in enumerate(gradients)]).bfloat16()
    for case, last, total in (("alone", 16, owed.clone()), ("beside 8 bits", 8, owed[:-8].clone())):
        dist.all_reduce(total)
        bits = dict.fromkeys(names, 16) | {"1.bias": last}
        layers = [LayerBits(n, 0, p.numel(), bits[n], 0.0, 0.0) for n, p in zip(names, parameters, strict=True)]
        plan = LinkPlan(world, 1e6, 0.0, 1 / 32, 0.0, (0.0,), 0.0, 0, tuple(layers))
        state = APSState("e4m3fn", bits="by link", model=model, plan=plan, error_feedback=True)
        state.residuals[parameters[0]] = torch.full((800,), 0.5)
        mean = exchange(state, [v.clone() for v in gradients], list(parameters))
        still = [n for n, p in zip(names, parameters, strict=True) if p in state.residuals]
        found[case] = {"mean": mean, "wanted": total.float() / world, "owed": still}
    return found


CHECKS = (measured, relinked, kept_high, tried, resumed, refused, not_finite, in_16_bits)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("by_link", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


def test_all_ranks_have_one_plan_and_replicas_are_bit_identical(results: list[dict[str, Any]]) -> None:
    first = results[0]["measured"]
    assert first["unplanned"]
    assert first["plan"]["ranks"] == WORLD
    assert 1e6 < first["plan"]["bytes_per_second"] < 1e11
    assert [layer["name"] for layer in first["plan"]["layers"]][-1].startswith("0.")
    for check in ("measured", "relinked", "not_finite"):
        for rank in results[1:]:
            assert torch.equal(rank[check]["weights"], results[0][check]["weights"]), check
            assert rank[check]["weights"].isfinite().all()
    assert all(rank["measured"]["plan"] == first["plan"] for rank in results)


def test_bits_follow_the_link_and_each_change_is_an_event(results: list[dict[str, Any]]) -> None:
    found = results[0]["relinked"]
    slow, about_as_slow, fast, again = found["bits"]
    assert slow["0.weight"] == slow["2.weight"] == 4
    assert about_as_slow == slow, "a tenth more is the same link"
    assert set(fast.values()) == {16}
    assert again["0.weight"] == again["2.weight"] == 4
    steps = [event[0] for event in found["events"]]
    assert sorted(set(steps)) == [MEASURED + 1 + 2 * PERIOD, MEASURED + 1 + 3 * PERIOD]
    _, kind, _, detail = next(e for e in found["events"] if e[2] == "0.weight")
    assert (kind, detail) == ("relinked", "4 bits to 16 bits, link 0.8 Mbit/s to 8e+06 Mbit/s")
    assert all(rank["relinked"]["events"] == found["events"] for rank in results)


def test_a_module_kept_high_is_no_layer_of_the_plan(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["kept_high"]["layers"] == ["0.bias", "0.weight"]
        weight, bias, *kept = rank["kept_high"]["differences"]
        assert max(kept) < 1e-6
        assert 1e-3 < max(weight, bias) < 0.3


def test_the_plan_is_tried_beside_each_width_and_the_fastest_stays(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["tried"]["8 bits"]
        count = len(found["seen"]) // TRIALS
        assert found["seen"][1:4] == [[32], [16], [8]]
        assert found["seen"] == found["seen"][:count] * TRIALS
        assert (found["again"], found["chosen"]) == (0, [8])
        found = rank["tried"]["all alike"]
        assert found["again"] == len(found["seen"]) // TRIALS, "those that differ little"
        assert found["chosen"] == [32], "of equally fast ones the one that rounds least"


def test_plan_and_residuals_resume_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["resumed"] == {"plan": True, "same": True, "feedback matters": True, "counted": True}


def test_16_bits_are_an_all_reduce_in_bf16_that_pays_what_earlier_codes_owe(results: list[dict[str, Any]]) -> None:
    for rank in results:
        for case, still_owed in (("alone", []), ("beside 8 bits", ["1.bias"])):
            found = rank["in_16_bits"][case]
            assert torch.equal(found["mean"][: len(found["wanted"])], found["wanted"])
            assert found["owed"] == still_owed


def test_ranks_that_would_not_send_alike_are_refused_in_words(results: list[dict[str, Any]]) -> None:
    for rank in results:
        said = rank["refused"]
        assert "ranks would not send alike: rank 0 has (step 6, link plan" in said["late"]
        assert "rank 1 has (step 0, no link plan); load the state of the same step on all" in said["late"]
        assert "rank 2 has (step 6, link plan" in said["other plan"]
        assert "scales each block by itself" in said["block format"]
        assert "needs model=, for the layers' names" in said["no model"]
        assert "APS options differ between ranks" in said["rates"]
        assert "has a layer '4.wieght'" in said["name"]
        assert "plan is for 8 ranks, and 3 are running" in said["ranks"]
        assert "weights['conv*'] names no parameter" in said["weights"]


def test_a_nan_on_one_rank_is_nan_on_all_and_delays_the_plan(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["not_finite"]
        assert found["delayed"]
        assert 4 in found["bits"].values()
        assert found["nans"] == results[0]["not_finite"]["nans"]
        assert all(n > 512 * 512 for n in found["nans"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"link": "1Mbit/s"}, "link= applies only with bits='by link'"),
        ({"bits": "by size"}, "did you mean 'by link'|allowed: "),
        ({"bits": "by link", "link": "fast"}, "'fast' is not understood"),
        ({"bits": "by link", "widths": (8, 4)}, "16 among them"),
        ({"bits": "by link", "error_budget": 0}, "positive share"),
        ({"bits": "by link", "link": 200}, "link is 200; give it text"),
        ({"bits": "by link", "widths": 16}, "widths=16 must be some of"),
        ({"bits": "by link", "accumulate": "format"}, "adds in float32"),
    ],
)
def test_bad_options_say_the_way_out(options: dict[str, Any], words: str) -> None:
    from fxprec.runtime.aps.options import APSOptions

    with pytest.raises(ConfigError, match=words):
        APSOptions(**options)
