"""One bit with error feedback: bits against a slow reference over steps, training, and what is sent."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from aps_buckets import FakeBucket
from aps_ranks import run_ranks, several
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed

from benchmarks.papers import one_bit
from benchmarks.papers.one_bit import OneBitState, one_bit_hook
from fxprec.errors import ConfigError
from fxprec.runtime.aps.layout import layout

WORLD, STEPS = 3, 4
SHAPES = ((5, 7), (5,), (0, 3), (2, 3, 2, 2), ())


def gradients(rank: int, step: int) -> list[Tensor]:
    """Any rank can make any other's."""
    g = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=g) * 10.0 ** (i - 2) for i, shape in enumerate(SHAPES)]


def coded(x: np.ndarray) -> np.ndarray:
    """What arrives of one row: of each sign the mean."""
    found = np.zeros_like(x)
    for mine in (x >= 0, ~(x >= 0)):
        if mine.any():
            found[mine] = np.float32(math.fsum(float(v) for v in x[mine]) / mine.sum())
    return found


def reference(feedback: bool) -> list[np.ndarray]:
    """The mean of every step, all ranks in one place: every row of every rank by itself."""
    rows = [size for s in SHAPES for size in ([math.prod(s[1:])] * s[0] if len(s) > 1 else [math.prod(s)]) if size]
    total = sum(rows)
    chunk = -(-total // WORLD)
    borders = sorted({0, *np.cumsum(rows).tolist(), *range(0, total, chunk)})
    pieces = [slice(a, b) for a, b in zip(borders, [*borders[1:], total], strict=True) if a < b]
    lost, lost_sum, found = np.zeros((WORLD, total), np.float32), np.zeros(total, np.float32), []
    for step in range(STEPS):
        wanted = [np.concatenate([g.numpy().ravel() for g in gradients(r, step)]) + lost[r] for r in range(WORLD)]
        mean = np.zeros(total, np.float32)
        for piece in pieces:
            arrived = [coded(w[piece]) for w in wanted]
            summed = lost_sum[piece].copy()
            for values in arrived:
                summed += values
            sent = coded(summed)
            mean[piece] = sent / np.float32(WORLD)
            if feedback:
                lost_sum[piece] = summed - sent
                for r in range(WORLD):
                    lost[r, piece] = wanted[r][piece] - arrived[r]
        found.append(mean)
    return found


def exchanged(rank: int, world: int) -> dict[str, list[Tensor]]:
    found = {}
    for feedback in (True, False):
        state = OneBitState(error_feedback=feedback)
        parameters = [nn.Parameter(torch.empty(shape)) for shape in SHAPES]
        buckets = [FakeBucket(gradients(rank, step), parameters) for step in range(STEPS)]
        found[str(feedback)] = [one_bit_hook(state, b).wait().clone() for b in buckets]
    return found


def odd(rank: int, world: int) -> dict[str, Any]:
    """A NaN in one row and the step after; other buckets than the step before; options that differ; bytes sent."""
    state, p = OneBitState(), [nn.Parameter(torch.empty(2, 64)), nn.Parameter(torch.empty(6))]
    bad = [torch.ones(2, 64), torch.ones(6)]
    bad[0][0, 0] = torch.nan if rank == 1 else 1.0
    first = one_bit_hook(state, FakeBucket(bad, p)).wait()
    after = one_bit_hook(state, FakeBucket([torch.ones(2, 64), torch.ones(6)], p)).wait()
    total, steps, once = torch.zeros(134), 60, torch.zeros(134)
    state, g = OneBitState(), torch.Generator().manual_seed(rank)
    mine = [torch.randn(2, 64, generator=g), torch.randn(6, generator=g)]
    for step in range(steps):
        order = [0, 1] if step < steps // 2 else [1, 0]
        made = one_bit_hook(state, FakeBucket([mine[i] for i in order], [p[i] for i in order])).wait()
        made = made if order == [0, 1] else torch.cat([made[6:], made[:6]])
        total, once = total + made, once if step else made
    exact = torch.cat([m.flatten() for m in mine])
    dist.all_reduce(exact)
    try:
        OneBitState(error_feedback=rank == 0)
        refusal = "no error"
    except ConfigError as error:
        refusal = str(error)
    sent: list[int] = []
    with mock.patch.object(dist, "all_to_all_single", lambda out, x, group: (sent.append(x.numel()), out.copy_(x))):
        big = [torch.randn(8, 3000)]
        one_bit_hook(OneBitState(), FakeBucket(big, [nn.Parameter(big[0])]))
    empty = one_bit_hook(OneBitState(), FakeBucket([], [])).wait()
    owed = torch.cat([sum(state.lost[kind][q] for kind in state.lost) for q in p])
    dist.all_reduce(owed)
    return {
        "NaN": first.isnan()[:64].any().item() and not first[64:].isnan().any().item(),
        "after": after.tolist(),
        "once": float((world * once - exact).norm() / exact.norm()),
        "drift": float((world * total + owed - steps * exact).abs().max() / exact.abs().max()),
        "refusal": refusal,
        "share": sent[0] / (4 * 24000),
        "empty": tuple(empty.shape),
    }


def trained(rank: int, world: int) -> dict[str, Any]:
    """Losses of a classifier after 100 steps under DDP, and whether replicas agree."""
    found: dict[str, Any] = {}
    for name, has_hook in (("plain", False), ("1-bit", True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5))
        ddp = DistributedDataParallel(model)
        if has_hook:
            ddp.register_comm_hook(OneBitState(), one_bit_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        data = torch.Generator().manual_seed(7 + rank)
        for _ in range(100):
            x = torch.randn(32, 12, generator=data)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), x[:, :5].argmax(1))
            loss.backward()
            optimizer.step()
        found[name] = float(loss)
        found[f"{name} weights"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    return found


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("one_bit", lambda: run_ranks(WORLD, several, [(check, ()) for check in (exchanged, odd, trained)]))


@pytest.mark.parametrize("feedback", [True, False])
def test_the_mean_has_the_references_bits_step_after_step(results: list[dict[str, Any]], feedback: bool) -> None:
    wanted = reference(feedback)
    for found in (r["exchanged"][str(feedback)] for r in results):
        for ours, theirs in zip(found, wanted, strict=True):
            assert np.array_equal(ours.numpy(), theirs)


def test_a_gpu_gets_two_numbers_a_row_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was eight bytes an element, from pageable memory, in every call."""
    uploads: list[int] = []
    monkeypatch.setattr(one_bit.on_device, "uploaded_for_good", lambda x, device: (uploads.append(x.numel()), x)[1])
    rows = one_bit._Rows(layout((3000, 5000, 7), 3))
    for _ in range(3):
        assert torch.equal(rows.slots(torch.device("cuda", 0)), rows.slots(torch.device("cpu")))
    assert uploads == [6, 6], "three rows, two of which are cut by a border of chunks, and the padding"
    rows.slots(torch.device("cuda", 1))
    assert uploads == [6] * 4


def test_what_is_lost_comes_later_also_when_buckets_change(results: list[dict[str, Any]]) -> None:
    for found in (r["odd"] for r in results):
        assert found["once"] > 0.3
        assert found["drift"] < 1e-4  # all that was sent and all that is owed are all that was wanted
        assert found["NaN"]
        assert found["after"] == [1.0] * 134
        assert "options differ between ranks" in found["refusal"]
        assert found["share"] == pytest.approx(1 / 32, rel=0.05)
        assert found["empty"] == (0,)


def test_training_with_feedback_follows_float32(results: list[dict[str, Any]]) -> None:
    for found in (r["trained"] for r in results):
        assert torch.equal(found["1-bit weights"], results[0]["trained"]["1-bit weights"])
        assert found["1-bit"] < found["plain"] + 0.15
