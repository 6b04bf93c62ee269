"""Layers in low rank: torch's own hook, the best rank r, what is owed, NaN, resuming, and which gradients go so."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from aps_ranks import run_ranks, several
from hypothesis import given, settings
from hypothesis import strategies as st
from test_by_link import FAST, SLOW, links, message_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, LinkPlan, aps_hook
from fxprec.runtime.aps import by_link, low_rank
from fxprec.runtime.aps.bucket import Part
from fxprec.runtime.aps.by_link import MEASURED, PERIOD
from fxprec.runtime.aps.link_planner import choose
from fxprec.runtime.aps.link_problem import STANDING, Layer, Problem, Width
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.low_rank import Factors, columns_of, errors_of
from fxprec.runtime.aps.low_rank_exchange import LowRankExchange
from fxprec.runtime.aps.options import APSOptions
from fxprec.runtime.aps.predict import Link
from fxprec.runtime.aps.wire import Sending

WORLD, RANK = 2, 4
SHAPES = ((40, 64), (64, 24), (32, 3, 5, 5))


def exchanged(state: APSState, parameters: list[Tensor], gradients: list[Tensor], dtype: torch.dtype | None) -> None:
    exchanged_views(state, parameters, [g.view(-1) for g in gradients], dtype)


def exchanged_views(state: APSState, parameters: list[Tensor], views: list[Tensor], dtype: torch.dtype | None) -> None:
    exchange = LowRankExchange(state, [Part(0, views, parameters, Sending(dtype, low_rank=RANK))])
    for stage in ("start", "prepare", "scatter", "reduce", "gather", "finish"):
        getattr(exchange, stage)()


def drawn(rank: int, step: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=g) for shape in (*SHAPES, (7,))]


def as_torchs(rank: int, world: int) -> float:
    """The largest difference from torch's hook over five steps, which begin from the same Q."""
    state, parameters = APSState("e4m3fn"), [nn.Parameter(torch.zeros(s)) for s in (*SHAPES, (7,))]
    hook_state = PowerSGDState(None, RANK, start_powerSGD_iter=2)
    hook_state.iter = 2

    class Bucket:
        def __init__(self, flat: Tensor) -> None:
            self.flat = flat

        def buffer(self) -> Tensor:
            return self.flat

        def index(self) -> int:
            return 0

        def is_last(self) -> bool:
            return True

        def gradients(self) -> list[Tensor]:
            sizes = [p.numel() for p in parameters]
            return [x.view(p.shape) for x, p in zip(self.flat.split(sizes), parameters, strict=True)]

    worst = 0.0
    for step in range(5):
        ours = drawn(rank, step)
        bucket = Bucket(torch.cat([g.flatten() for g in ours]))
        theirs = powerSGD_hook(hook_state, bucket).wait()
        if step:
            exchanged(state, parameters, ours, None)
            worst = max(worst, float((torch.cat([g.flatten() for g in ours]) - theirs).abs().max()))
        kept = hook_state.error_dict[0].split([p.numel() for p in parameters])
        at = 0
        for parameter, lost in zip(parameters[:-1], kept, strict=False):
            columns = columns_of(parameter, RANK)
            if step == 0:
                state.memory.residuals[parameter] = lost.clone()
                size = columns * RANK
                state.memory.factors[parameter] = (
                    hook_state.q_memory_dict[0][at : at + size].view(columns, RANK).clone()
                )
                at += size
            else:
                worst = max(worst, float((state.residuals[parameter] - lost).abs().max()))
    return worst


def owes(rank: int, world: int) -> list[float]:
    """All that has arrived and the mean of what is owed is the sum of all mean gradients, whatever P and Q round."""
    state, parameters = APSState("e4m3fn"), [nn.Parameter(torch.zeros(s)) for s in (*SHAPES, (7,))]
    left = [torch.zeros(s, dtype=torch.float64) for s in SHAPES]
    for step in range(6):
        gradients = drawn(rank, step)
        for total, g in zip(left, gradients, strict=False):
            mean = g.double()
            dist.all_reduce(mean)
            total += mean / world
        exchanged(state, parameters, gradients, torch.bfloat16)
        for total, g in zip(left, gradients, strict=False):
            total -= g
    found = []
    for total, parameter in zip(left, parameters, strict=False):
        owed = state.residuals[parameter].double().view_as(total)
        dist.all_reduce(owed)
        found.append(float((total - owed / world).abs().max()))
    return found


def not_finite(rank: int, world: int) -> dict[str, Any]:
    """One rank's inf: NaN in the whole layer and in no other, then finite values from the next step on."""
    state, parameters = APSState("e4m3fn"), [nn.Parameter(torch.zeros(s)) for s in (*SHAPES, (7,))]
    exchanged(state, parameters, drawn(rank, 0), torch.bfloat16)
    bad, after = drawn(rank, 1), drawn(rank, 2)
    if rank == 1:
        bad[0][3, 5] = torch.inf
    exchanged(state, parameters, bad, torch.bfloat16)
    exchanged(state, parameters, after, torch.bfloat16)
    return {"nans": [float(g.isnan().float().mean()) for g in bad], "after": torch.cat([g.flatten() for g in after])}


def measured(rank: int, world: int) -> list[float]:
    """The error that is measured of a gradient of rank 3, and of one of full rank, beside the best rank 4's."""
    g = torch.Generator().manual_seed(rank)
    low = torch.randn(128, 3, generator=torch.Generator().manual_seed(9)) @ torch.randn(3, 96, generator=g)
    full = torch.randn(128, 96, generator=g)
    found = []
    for gradient in (low, full):
        mean = gradient.double()
        dist.all_reduce(mean)
        mean /= world
        best = float(torch.linalg.svdvals(mean)[RANK:].square().sum())
        state = APSState("e4m3fn")
        layers = [(nn.Parameter(gradient.clone()), gradient)]
        error = float(errors_of(layers, RANK, state.memory, state.groups.exponents, in_force=False)[0][0])
        found += [error / float(mean.square().sum()), best / float(mean.square().sum())]
    return found


def as_they_lie(rank: int, world: int) -> dict[str, Any]:
    """A convolution's gradient in channels_last beside a contiguous one; a bucket of vectors alone."""
    g = torch.Generator().manual_seed(rank)
    gradient, vector = torch.randn(32, 3, 5, 5, generator=g), torch.randn(7, generator=g)
    means = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        state, parameter = APSState("e4m3fn"), nn.Parameter(torch.zeros(32, 3, 5, 5))
        for _ in range(2):
            view = gradient.clone(memory_format=memory_format)
            exchanged_views(state, [parameter], [view.view(-1) if view.is_contiguous() else view], None)
        means.append(view)
    alone = vector.clone()
    exchanged_views(APSState("e4m3fn"), [nn.Parameter(torch.zeros(7))], [alone], None)
    dist.all_reduce(vector)
    return {"same": torch.equal(*means), "vector": torch.equal(alone, vector / world)}


class Training:
    """A deep MLP in several buckets, whose gradients are of low rank; its weights stand still."""

    def __init__(self, rank: int, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(256, 4)), bucket_cap_mb=0.3)
        chosen = {"link": "1Mbit/s, 1ms", "low_rank": RANK} | options
        self.state = APSState("e4m3fn", bits="by link", model=self.ddp, **chosen)
        self.ddp.register_comm_hook(self.state, aps_hook)
        self.x = torch.randn(32, 256, generator=torch.Generator().manual_seed(rank))

    def step(self, count: int = 1) -> Tensor:
        for _ in range(count):
            self.ddp.zero_grad()
            nn.functional.cross_entropy(self.ddp(self.x), self.x[:, :4].argmax(1)).backward()
        return torch.cat([p.grad.flatten() for p in self.ddp.parameters()])

    def step_to_plan(self) -> dict[str, Any]:
        self.step(MEASURED + 2)
        return self.state.by_link.plan.to_dict()


def trained(rank: int, world: int) -> dict[str, Any]:
    whole, again = Training(rank), Training(rank)
    exact = whole.step()
    whole.step(MEASURED + 3)
    saved = whole.state.state_dict()
    again.ddp(again.x).sum().backward()
    again.state.residuals[list(again.ddp.parameters())[-1]] = torch.ones(4)  # is of another run, and goes
    again.state.load_state_dict(saved)
    plan = whole.state.by_link.plan
    same = [torch.equal(whole.step(), again.step()) for _ in range(3)]
    last = whole.step()
    kept = [*whole.state.residuals.values(), *whole.state.memory.factors.values()]
    return {
        "ways": set(plan.ways.values()),
        "gradient": last,
        "error": float((last - exact).square().sum() / exact.square().sum()),
        "same": all(same),
        "kept": sum(x.nbytes for x in kept),
        "planned": plan.bytes_kept,
    }


def left(rank: int, world: int) -> dict[str, Any]:
    """What is kept after low rank is planned, and after the link has become fast and the plan is another one."""
    found = {}
    with links(SLOW, FAST), mock.patch.object(by_link, "TRIALS", 0):
        training = Training(rank, link=None)
        for name in ("slow", "fast"):
            training.step(MEASURED + 3 if name == "slow" else PERIOD)
            memory = training.state.memory
            found[name] = len(memory.residuals), len(memory.factors), training.state.by_link.plan.bytes_kept
    return found


def measured_with_a_nan(rank: int, world: int) -> dict[str, Any]:
    """A NaN on one rank in the step of the statistics: whether there is a plan one step later, and after five more."""
    training = Training(rank)
    training.step(MEASURED)
    x, training.x = training.x, training.x.clone()
    training.x[0, 0] = torch.nan if rank == 1 else training.x[0, 0]
    training.step()
    training.x = x
    training.step()
    delayed = training.state.by_link.plan is None
    return {"delayed": delayed, "gradient": training.step(MEASURED + 2), "plan": training.step_to_plan()}


def refused(rank: int, world: int) -> dict[str, str]:
    """Ranks that multiply to other bits, a plan of another rank, and FSDP2."""
    training = Training(rank)
    inexact = mock.patch.object(low_rank, "_orthonormal", lambda x: torch.linalg.qr(x).Q * (1 + 1e-6 * rank))
    with inexact:
        products = message_of(lambda: training.step(MEASURED + 3))
    plan = LinkPlan.from_dict(Training(rank).step_to_plan())
    return {
        "products": products,
        "rank": message_of(lambda: Training(rank, plan=plan, low_rank=RANK + 1)),
        "no rank": message_of(lambda: Training(rank, plan=plan, low_rank=0)),
        "FSDP2": message_of(lambda: Training(rank).state.by_link.sharded([], gathers=False)),
    }


CHECKS = (as_torchs, owes, not_finite, as_they_lie, measured, measured_with_a_nan, trained, left, refused)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("low_rank", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


def test_in_32_bits_it_is_torchs_hook(results: list[dict[str, Any]]) -> None:
    assert max(rank["as_torchs"] for rank in results) < 2e-5


def test_what_is_not_sent_is_owed(results: list[dict[str, Any]]) -> None:
    assert max(max(rank["owes"]) for rank in results) < 2e-5


def test_an_inf_on_one_rank_makes_its_layer_nan_on_all_for_one_step(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["not_finite"]["nans"] == [1.0, 0.0, 0.0, 0.0]
        assert rank["not_finite"]["after"].isfinite().all()
        assert torch.equal(rank["not_finite"]["after"], results[0]["not_finite"]["after"])


def test_gradients_of_other_strides_and_vectors_alone_are_averaged(results: list[dict[str, Any]]) -> None:
    assert all(rank["as_they_lie"] == {"same": True, "vector": True} for rank in results)


def test_a_nan_on_one_rank_delays_the_plan_and_is_nobodys_error(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["measured_with_a_nan"]
        assert found["delayed"]
        assert found["gradient"].isfinite().all()
        assert any(row["low_rank"] for row in found["plan"]["layers"])


def test_nothing_is_kept_of_layers_that_left_low_rank(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert min(rank["left"]["slow"]) > 0
        assert rank["left"]["fast"] == (0, 0, 0)


def test_what_ranks_cannot_do_alike_is_refused_in_words(results: list[dict[str, Any]]) -> None:
    for rank in results:
        said = rank["refused"]
        assert (
            f"low_rank={RANK}: ranks multiply to different bits, and replicas would diverge: rank 0" in said["products"]
        )
        assert "number of threads, or leave low_rank out" in said["products"]
        for name in ("rank", "no rank"):
            assert f"in rank {RANK}; give low_rank={RANK}, or plan again" in said[name]
        assert "under FSDP2 no rank has a whole matrix; leave it out" in said["FSDP2"]


def test_the_measured_error_is_that_of_the_best_rank_or_more(results: list[dict[str, Any]]) -> None:
    low, best_low, full, best_full = results[0]["measured"]
    assert best_low < low < 1e-9
    assert 0.8 * best_full < full < 4
    assert all(rank["measured"] == results[0]["measured"] for rank in results)


def test_a_plan_sends_in_low_rank_resumes_bit_for_bit_and_counts_what_it_keeps(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["trained"]
        assert f"rank {RANK} in 16 bits" in found["ways"]
        assert torch.equal(found["gradient"], results[0]["trained"]["gradient"])
        assert found["error"] < 1 / 32
        assert found["same"]
        assert found["kept"] == found["planned"]


def test_bytes_by_the_kernels_counters_are_the_plans() -> None:
    """In a network of its own: other tests' ranks send by the same interface."""
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which(alone[0]) is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("no network namespaces here")
    script = [*alone, sys.executable, str(Path(__file__).with_name("bytes_of_a_plan.py"))]
    ran = subprocess.run(
        script, capture_output=True, text=True, timeout=200, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["low rank"][1] == [f"rank {RANK} in 16 bits"]
    for name, (ratio, _) in found.items():
        assert ratio == pytest.approx(1, abs=0.02), name


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.integers(0, 3), st.integers(0, 99))
def test_one_rank_gets_the_projection_on_its_own_columns(n: int, m: int, r: int, true_rank: int, seed: int) -> None:
    """P Q^T is P P^T M in float64: exact where M has at most r independent columns."""
    g = torch.Generator().manual_seed(seed)
    r = min(n, m, r)
    matrix = torch.randn(n, true_rank, generator=g) @ torch.randn(true_rank, m, generator=g)
    start = torch.randn(m, r, generator=g)
    step = Factors([matrix], [start])
    sums = step.rows()
    p, q, _ = step.pairs(step.columns(sums))[0]
    product = p @ q.T
    p = torch.linalg.qr(matrix.double() @ torch.linalg.qr(start.double()).Q).Q
    if true_rank <= r:
        assert torch.allclose(product, matrix, atol=1e-3)
    else:
        assert torch.allclose(product.double(), p @ p.T @ matrix.double(), atol=1e-2)
    assert float(product.square().sum()) <= float(matrix.square().sum()) * (1 + 1e-4) + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.sampled_from([1e-3, 0.03]), st.integers(0, 9))
def test_a_layer_goes_in_low_rank_only_where_what_it_misses_keeps_the_budget(
    missed: list[float], budget: float, seed: int
) -> None:
    draw = random.Random(seed)
    layers = tuple(
        Layer(f"l{k}", k, 512 * 512, 1.0, 0.01, columns=512, missed=share * draw.choice([1e-5, 1.0]))
        for k, share in enumerate(missed)
    )
    cast = Width(16, 2, error=1e-6)
    widths = (cast, Width(8, 1, error=6e-4), replace(cast, low_rank=4))
    problem = Problem(layers, (0.0,) * len(layers), widths, Links(Link(1e5)), 4, budget)
    plan = choose(problem)
    chosen = [layer for layer, row in zip(layers, plan.layers, strict=True) if row.low_rank]
    assert STANDING * sum(layer.missed for layer in chosen) / len(layers) <= budget * (1 + 1e-9)
    for row in plan.layers:
        assert row.low_rank in (0, 4)
    if all(STANDING * layer.missed < budget / 2 for layer in layers):
        assert len(chosen) == len(layers)
    assert plan.bytes_kept == 4 * len(chosen) * (512 * 512 + 4 * 512)


def test_a_state_saved_before_low_rank_is_resumed() -> None:
    """Options are compared by their text: what leaves low rank out is what was saved then."""
    options = {"format": "e4m3fn", "bits": "by link", "seed": 3}
    assert "low_rank" not in APSOptions(**options).text()
    assert APSOptions(**options, low_rank=4).text() == f"{APSOptions(**options).text()}, low_rank=4"
