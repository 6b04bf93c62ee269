"""What the hook's options do, and that ranks must agree on them; on two ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from aps_buckets import SIZES, FakeBucket, exchange, gradients_of, mean_of_ranks, parameters_like
from aps_ranks import run_ranks, several
from torch import Tensor, nn

from benchmarks.papers.one_bit import OneBitState
from fxprec.aps import APSState, aps_hook
from fxprec.errors import ConfigError
from fxprec.runtime.aps.bucket import Exchange
from fxprec.runtime.aps.low_rank import Memory
from fxprec.runtime.aps.options import APSOptions

WORLD = 2
LAST = slice(-SIZES[-1], None)
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"format": "e4m3fn"}, {"format": "e5m2"}),
    ({"accumulate": "format"}, {"accumulate": "kahan"}),
    ({"accumulate": "format", "group_size": 2}, {"accumulate": "format"}),
    ({"rounding": "stochastic", "seed": 1}, {"rounding": "stochastic", "seed": 2}),
    ({"high_steps": 5}, {"high_steps": 6}),
    ({}, {"keep_high": [nn.Parameter(torch.empty(7))]}),
]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Of the last layer."""
    return float((found[LAST] - wanted[LAST]).norm() / wanted[LAST].norm())


def mean_of_calls(rank: int, world: int, state: APSState, calls: int) -> float:
    """Relative error of the mean over many exchanges of the same gradients."""
    parameters = parameters_like(gradients_of(rank))
    total = sum(exchange(state, gradients_of(rank), parameters) for _ in range(calls))
    return relative_error(total / calls, mean_of_ranks(list(range(world))))


def mismatched(rank: int, world: int) -> list[str]:
    messages = []
    for pair in DIFFERENT:
        try:
            APSState(**pair[rank])
            messages.append("no error")
        except ConfigError as error:
            messages.append(str(error))
    return messages


def bf16_gradients(rank: int, world: int) -> tuple[str, bool]:
    layers = [g.bfloat16() for g in gradients_of(rank)]
    found = exchange(APSState("e4m3fn"), layers)
    wide = exchange(APSState("e4m3fn"), [g.float() for g in layers])
    return str(found.dtype), torch.equal(found, wide.bfloat16())


def schedule(rank: int, world: int) -> list[bool]:
    """Per call, whether the result was the exact mean: two high steps, then low; then epoch 1 of high_epochs=1."""
    mean = mean_of_ranks(list(range(world)))

    def call(state: APSState) -> bool:
        return bool(torch.allclose(exchange(state, gradients_of(rank)), mean, rtol=1e-6, atol=0))

    by_step, by_epoch = APSState(high_steps=2), APSState(high_epochs=1)
    seen = [call(by_step) for _ in range(3)] + [call(by_epoch)]
    by_epoch.set_epoch(1)
    return [*seen, call(by_epoch)]


def resumed(rank: int, world: int) -> tuple[bool, bool, str]:
    """Whether steps draw different numbers; whether a loaded state draws those of the one that got there; a refusal."""
    first = APSState(rounding="stochastic")
    one, saved = exchange(first, gradients_of(rank)), first.state_dict()
    two = exchange(first, gradients_of(rank))
    second = APSState(rounding="stochastic")
    second.load_state_dict(saved)
    try:
        APSState(seed=3).load_state_dict(saved)
        refusal = "no error"
    except ConfigError as error:
        refusal = str(error)
    return not torch.equal(one, two), torch.equal(exchange(second, gradients_of(rank)), two), refusal


def feedback(rank: int, world: int) -> dict[str, float]:
    found = {
        "without": mean_of_calls(rank, world, APSState("1-2-1"), 64),
        "with": mean_of_calls(rank, world, APSState("1-2-1", error_feedback=True), 64),
        "blocks without": mean_of_calls(rank, world, APSState("1-2-1/256:e8m0"), 1),
        "blocks with": mean_of_calls(rank, world, APSState("1-2-1/256:e8m0", error_feedback=True), 64),
    }
    state, parameters = APSState("1-2-1", error_feedback=True), parameters_like(gradients_of(rank))
    saved, first = state.state_dict(), exchange(state, gradients_of(rank), parameters)
    exchange(state, gradients_of(rank, "nan"), parameters)
    after = exchange(state, gradients_of(rank), parameters)
    state.load_state_dict(saved)
    again = exchange(state, gradients_of(rank), parameters)
    return {**found, "after a NaN": float(after.isfinite().float().mean()), "loaded": float((again - first).norm())}


def stochastic(rank: int, world: int) -> dict[str, float]:
    """Errors of the mean over 200 draws in 1-3-0, which to nearest have a bias."""
    modes: dict[str, dict[str, Any]] = {
        "nearest": {},
        "fp32": {"rounding": "stochastic"},
        "format": {"rounding": "stochastic", "accumulate": "format"},
    }
    return {name: mean_of_calls(rank, world, APSState("1-3-0", **options), 200) for name, options in modes.items()}


def odd_buckets(rank: int, world: int) -> dict[str, Any]:
    """Buckets of nothing, of one empty layer, of one number; and one cut into parts by a large layer."""
    found: dict[str, Any] = {}
    for mode in ("fp32", "format"):
        state = APSState(accumulate=mode)
        for name, sizes in (("none", ()), ("empty", (0,)), ("one", (1,))):
            found[f"{mode} {name}"] = exchange(state, [torch.full((n,), 1.0 + rank) for n in sizes]).tolist()
        sizes = (1_050_000, 3, 5)
        result = exchange(state, [torch.full((n,), float(k + 1)) for k, n in enumerate(sizes)])
        found[f"{mode} parts"] = [(float(v.min()), float(v.max())) for v in result.split(list(sizes))]
    return found


def overlap(rank: int, world: int) -> bool:
    """Whether bucket 1's exponents arrive while bucket 0's payload has not left yet."""
    started: dict[int, Exchange] = {}
    arrived = []
    start, scatter = Exchange.start, Exchange.scatter

    def noted_start(self: Exchange) -> None:
        start(self)
        started[self.part.bucket] = self

    def held_scatter(self: Exchange) -> None:
        if self.part.bucket == 0:
            deadline = time.monotonic() + 10
            while not (1 in started and started[1].largest.has_arrived) and time.monotonic() < deadline:
                time.sleep(0.01)
            arrived.append(time.monotonic() < deadline)
        scatter(self)

    state = APSState()
    with mock.patch.object(Exchange, "start", noted_start), mock.patch.object(Exchange, "scatter", held_scatter):
        layers = gradients_of(rank)
        buckets = [FakeBucket(layers, parameters_like(layers), index=k, last=k == 1) for k in range(2)]
        for future in [aps_hook(state, bucket) for bucket in buckets]:
            future.wait()
    return arrived == [True]


CHECKS = (mismatched, bf16_gradients, schedule, resumed, feedback, stochastic, odd_buckets, overlap)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("options", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


def test_different_options_fail_on_every_rank_naming_both(results: list[dict[str, Any]]) -> None:
    for messages in (r["mismatched"] for r in results):
        for message, pair in zip(messages, DIFFERENT, strict=True):
            assert "options differ between ranks: rank 0 has (" in message
            assert "give every rank the same" in message
            for options in pair:
                for name, value in options.items():
                    assert f"{name}=[(7,)]" in message if name == "keep_high" else f"{name}={value!r}" in message


def test_bf16_gradients_are_worked_on_in_float32_and_rounded_once(results: list[dict[str, Any]]) -> None:
    assert all(r["bf16_gradients"] == ("torch.bfloat16", True) for r in results)


def test_the_schedule_sends_high_first(results: list[dict[str, Any]]) -> None:
    assert all(r["schedule"] == [True, True, False, True, False] for r in results)


def test_a_resumed_state_draws_the_same_random_numbers(results: list[dict[str, Any]]) -> None:
    for steps_differ, same_after_loading, refusal in (r["resumed"] for r in results):
        assert steps_differ
        assert same_after_loading
        assert "build it with the same options" in refusal


def test_error_feedback_makes_the_error_of_many_steps_vanish(results: list[dict[str, Any]]) -> None:
    for found in (r["feedback"] for r in results):
        assert found["without"] > 0.05
        assert found["with"] < found["without"] / 5
        assert found["blocks with"] < found["blocks without"] / 20, "new signs each step alone give an eighth"
        assert found["after a NaN"] == 1
        assert found["loaded"] == 0


def test_stochastic_rounding_has_no_bias_where_nearest_has(results: list[dict[str, Any]]) -> None:
    for found in (r["stochastic"] for r in results):
        assert found["nearest"] > 0.1
        assert found["fp32"] < 0.05
        assert found["format"] < 0.05


def test_empty_buckets_single_numbers_and_buckets_in_parts(results: list[dict[str, Any]]) -> None:
    for found in (r["odd_buckets"] for r in results):
        for mode in ("fp32", "format"):
            assert found[f"{mode} none"] == found[f"{mode} empty"] == []
            assert found[f"{mode} one"] == [1.5]
            assert found[f"{mode} parts"] == [(1, 1), (2, 2), (3, 3)]


def test_exponents_travel_beside_the_payload_of_the_bucket_before(results: list[dict[str, Any]]) -> None:
    assert all(r["overlap"] for r in results)


@pytest.mark.parametrize("state", [APSState, OneBitState])
def test_without_a_process_group_the_error_says_what_to_call(state: type) -> None:
    with pytest.raises(ConfigError, match=f"{state.__name__} needs .* call init_process_group before it"):
        state()


def test_what_a_rank_owes_is_loaded_to_its_parameters_device() -> None:
    """A checkpoint is read to the CPU, the parameters are on a GPU, for which "meta" stands here."""
    parameter, state = torch.empty(4, device="meta"), APSState.__new__(APSState)
    state.by_link = SimpleNamespace(resume=lambda plan: None, parameter_of=lambda name: parameter)  # type: ignore[assignment]
    state.options, state.memory, state.calls = APSOptions(), Memory(0), Counter()
    state.load_state_dict({"options": state.options.text(), "step": 3, "epoch": 0, "residuals": {"w": torch.ones(4)}})
    assert state.residuals[parameter].device == parameter.device
