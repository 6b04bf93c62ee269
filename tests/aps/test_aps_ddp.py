"""APS under DistributedDataParallel: replicas, options, odd buckets, compilation. One process group for most."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from aps_checks import several, train_modes
from aps_ranks import run_ranks

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "format": {"format": "1-5-2", "accumulate": "format"},
    "hierarchical": {"format": "1-4-3", "accumulate": "format", "group_size": 2},
    "kahan": {"accumulate": "kahan"},
    "stochastic": {"rounding": "stochastic", "error_feedback": True},
    "codec": {"format": "dynamic-tree"},
    "wide": {"format": "1-6-9", "high_steps": 50},
}
CHECKS: list[tuple[str, tuple[Any, ...]]] = [
    ("unused_parameters", ()),
    ("bf16_gradients", ()),
    ("kept_high", ()),
    ("schedule", ()),
    ("resumed", ()),
    ("feedback", ()),
    ("stochastic_mean", ()),
    ("mismatched_options", ()),
    ("compiled", ()),
    ("odd_buckets", ()),
    ("fsdp", ()),
    ("tensor_parallel", ()),
]


@cache
def checks() -> list[dict[str, Any]]:
    return run_ranks(2, several, CHECKS)


@cache
def trained() -> dict[str, list[torch.Tensor]]:
    """Parameters after 200 steps, by mode and rank; three ranks make a short last sub-group."""
    pairs = [name for name in MODES if name != "hierarchical"]
    two = run_ranks(2, train_modes, [MODES[name] for name in pairs], 200)
    three = run_ranks(3, train_modes, [MODES["hierarchical"]], 200)
    found = {name: [rank[k] for rank in two] for k, name in enumerate(pairs)}
    return {**found, "hierarchical": [rank[0] for rank in three]}


@pytest.mark.parametrize("mode", MODES)
def test_replicas_are_bit_identical_after_200_steps(mode: str) -> None:
    first, *others = trained()[mode]
    assert first.abs().max() < 10
    assert others
    assert all(torch.equal(first, other) for other in others)


def test_modes_train_differently() -> None:
    """On two ranks a sum of two has one rounding in every mode, so not all modes differ."""
    finals = [trained()[mode][0] for mode in ("fp32", "hierarchical", "stochastic", "codec", "wide")]
    assert len({tuple(f.tolist()) for f in finals}) == len(finals)


def test_unused_parameters_and_parameters_of_no_or_one_element() -> None:
    for found in (r["unused_parameters"] for r in checks()):
        assert found["unused"]
        assert found["error"] < 2**-8
        assert found["one"] == pytest.approx(1, abs=2**-8)
        assert found["none"] == (0,)


def test_bf16_gradients_are_worked_on_in_float32_and_rounded_once() -> None:
    assert all(r["bf16_gradients"] == {"dtype": "torch.bfloat16", "equal": True} for r in checks())


def test_empty_buckets_single_numbers_and_buckets_in_parts() -> None:
    for found in (r["odd_buckets"] for r in checks()):
        for mode in ("fp32", "format"):
            assert found[f"{mode} none"] == found[f"{mode} empty"] == []
            assert found[f"{mode} one"] == [1.5]
            assert found[f"{mode} parts"] == [(1, 1), (2, 2), (3, 3)]


def test_the_layer_kept_high_equals_plain_ddp_and_the_others_do_not() -> None:
    assert all(r["kept_high"]["equal"][-2:] == [True, True] for r in checks())
    assert not any(r["kept_high"]["equal"][0] for r in checks())


def test_the_schedule_sends_high_first() -> None:
    assert all(r["schedule"] == [True, True, False, True, False] for r in checks())


def test_a_resumed_state_draws_the_same_random_numbers() -> None:
    assert all(r["resumed"] for r in checks())


def test_error_feedback_makes_the_error_of_many_steps_vanish() -> None:
    without, fed = checks()[0]["feedback"]
    assert without > 0.05
    assert fed < without / 5


def test_stochastic_rounding_has_no_bias() -> None:
    assert all(r["stochastic_mean"] < 0.05 for r in checks())


def test_different_formats_fail_on_every_rank_naming_both() -> None:
    for message in (r["mismatched_options"] for r in checks()):
        assert "e5m2" in message
        assert "e4m3fn" in message
        assert "give every rank the same" in message


def test_compiled_inside_and_outside_of_ddp() -> None:
    """Plain backends see the pieces of the DDP optimizer; fxprec sees the whole graph once it is switched off."""
    for found in (r["compiled"] for r in checks()):
        assert found["switched"] == [True, False]
        for make in ("compile(ddp)", "ddp(compile)"):
            pieces, error = found[f"{make} aot_eager"]
            assert pieces > 1
            assert error < 1e-6
            plans, error = found[f"{make} fxprec"]
            assert plans == 1
            assert 0 < error < 0.2  # fp8 activations, not the exchange


def test_fsdp2_reduces_in_codes_and_refuses_what_it_cannot_honour() -> None:
    for found in (r["fsdp"] for r in checks()):
        assert found["count"] == 2
        assert all(0 < e < 0.05 for e in found["errors"])
        assert "it needs accumulate='fp32'" in found["refusal"]


def test_tensor_parallel_layers_in_codes() -> None:
    for found in (r["tensor_parallel"] for r in checks()):
        assert found.pop("all-to-all backward") < 1e-6  # whole numbers over their maximum are exact enough
        assert found.pop("all-reduce backward") < 1e-6
        assert all(0 < e < 0.05 for e in found.values()), found
