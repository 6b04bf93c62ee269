"""A rank lost in the middle of the exchange: the others end with torch.distributed's own error, within its timeout."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from aps_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fxprec import compat
from fxprec.aps import APSReduceScatter, APSState, LayerBits, LinkPlan, aps_hook, use_aps
from fxprec.errors import LostRankError, LoweringError
from fxprec.runtime.aps import hook, kernels, lost
from fxprec.runtime.aps.bucket import Exchange
from fxprec.runtime.aps.by_link import ByLink
from fxprec.runtime.aps.fsdp_gather import APSAllGather
from fxprec.runtime.aps.lost import GRACE, RollCall
from fxprec.runtime.aps.low_rank_exchange import LowRankExchange
from fxprec.runtime.aps.predict import Link

TIMEOUT = 10  # seconds
MODES = {"fp32": {}, "hierarchical": {"accumulate": "format", "group_size": 2}}


def plan_of(model: nn.Module, bits: int, low_rank: int = 0) -> LinkPlan:
    """A plan of three ranks with these bits, and this rank, for all layers."""
    row = {"bits": bits, "exposed": 0.0, "error": 0.0, "low_rank": low_rank}
    layers = [LayerBits(name, 0, p.numel(), **row) for name, p in model.named_parameters()]
    return LinkPlan(3, 1e6, 0.0, 1 / 32, 0.0, (0.0,), 0.0, 0, tuple(layers))


def loses_rank_1(rank: int, world: int, how: str, mode: str, ended: str) -> tuple[str, float]:
    """In the second step rank 1 has its exponents through and then dies or stalls; how this rank's backward ended."""
    kernels.library()  # a first compilation takes longer than the timeout
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    ddp = DistributedDataParallel(model)
    low_rank = int("low rank" in mode)
    plan = plan_of(model, 16 if "plain" in mode or low_rank else 8, low_rank)
    by_link = {"bits": "by link", "model": ddp, "plan": plan, "low_rank": low_rank}
    ddp.register_comm_hook(APSState(**(by_link if "by link" in mode else MODES[mode])), aps_hook)
    x = torch.randn(6, 12)
    ddp(x).sum().backward()
    loss = ddp(x).sum()

    def stops(*_: object) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + 2 * TIMEOUT
        while time.monotonic() < until and len(os.listdir(ended)) < world - 1:  # no longer than the others wait
            time.sleep(0.1)

    start = time.monotonic()
    owner, stage = (hook, "_reduce") if "plain" in mode else (Exchange, "reduce" if "hier" in mode else "scatter")
    owner, stage = (LowRankExchange, "gather") if low_rank else (owner, stage)
    with mock.patch.object(owner, stage, stops if rank == 1 else getattr(owner, stage)):
        try:
            loss.backward()
        except RuntimeError as error:
            Path(ended, str(rank)).touch()
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def loses_rank_1_of_nodes(rank: int, world: int, where: str) -> tuple[str, float]:
    """In the second step rank 1, of two nodes of two, dies in a stage of an exchange by nodes; others go on if they can."""
    kernels.library()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    ddp = DistributedDataParallel(model)
    alike = plan_of(model, 16 if where == "scatter" else 4)
    rows = tuple(replace(row, by_nodes=True) for row in alike.layers)
    plan = replace(alike, ranks=world, node=2, inside=Link(1e9), layers=rows)
    ddp.register_comm_hook(APSState("e4m3fn", bits="by link", model=ddp, plan=plan, group_size=2), aps_hook)
    ddp(torch.randn(6, 12)).sum().backward()

    def stops(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    with mock.patch.object(Exchange, where, stops if rank == 1 else getattr(Exchange, where)):
        try:
            for _ in range(3):
                ddp(torch.randn(6, 12)).sum().backward()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def loses_rank_1_under_fsdp(rank: int, world: int, where: str) -> tuple[str, float]:
    """In the second step rank 1 dies in a gather or in a reduce-scatter; how this rank's step ended."""
    kernels.library()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    use_aps(model, APSState("e4m3fn", bits="by link", model=model), parameters="by link")
    model(torch.randn(6, 12)).sum().backward()

    def stops(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    owner = APSAllGather if where == "gather" else APSReduceScatter
    with mock.patch.object(owner, "__call__", stops if rank == 1 else owner.__call__):
        try:
            model(torch.randn(6, 12)).sum().backward()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


@pytest.mark.parametrize("where", ["add", "scatter", "share"])
def test_a_rank_lost_by_nodes_is_named_on_its_node_and_on_the_other(where: str) -> None:
    """16 bits by nodes where it dies between nodes, else 4."""
    ends = run_ranks(4, loses_rank_1_of_nodes, where, timeout=TIMEOUT)
    for message, seconds in (ends[0], *ends[2:]):
        assert "exchange of gradients failed: rank 1 does not answer; restart the job from a checkpoint" in message
        assert seconds < 2 * TIMEOUT + 3 * GRACE


@pytest.mark.parametrize("where", ["gather", "reduce-scatter"])
def test_bits_by_link_name_the_lost_rank_under_fsdp(where: str) -> None:
    ends = run_ranks(3, loses_rank_1_under_fsdp, where, timeout=TIMEOUT)
    for message, seconds in (ends[0], ends[2]):
        assert "exchange of gradients failed: rank 1 does not answer; restart the job from a checkpoint" in message
        assert seconds < 2 * TIMEOUT + 3 * GRACE


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("killed", "by link"),
        ("stalled", "by link"),
        ("killed", "by link, plain"),
        ("killed", "by link, low rank"),
        ("stalled", "by link, low rank"),
    ],
)
def test_bits_by_link_name_the_lost_rank(how: str, mode: str, tmp_path: Path) -> None:
    ends = run_ranks(3, loses_rank_1, how, mode, str(tmp_path), timeout=TIMEOUT)
    for message, seconds in (ends[0], ends[2]):
        assert "exchange of gradients failed: rank 1 does not answer; restart the job from a checkpoint" in message
        assert seconds < 2 * TIMEOUT + 3 * GRACE


@pytest.mark.parametrize(("how", "mode"), [("killed", "fp32"), ("killed", "hierarchical"), ("stalled", "fp32")])
def test_the_others_end_with_torchs_error_when_a_rank_is_lost(how: str, mode: str, tmp_path: Path) -> None:
    ends = run_ranks(3, loses_rank_1, how, mode, str(tmp_path), timeout=TIMEOUT)
    assert (ends[1] is None) == (how == "killed")
    for message, seconds in (ends[0], ends[2]):
        assert message.startswith(("RuntimeError", "DistBackendError", "DistNetworkError")), message
        assert any(word in message for word in ("Connection", "Timed out", "timed out", "gloo")), message
        assert seconds < 2 * TIMEOUT


class _RollCall:
    def lost(self, error: BaseException) -> LostRankError:
        return LostRankError("rank 1 does not answer")


@pytest.mark.parametrize(
    ("error", "is_named"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (LoweringError("a kernel does not compile"), False),
        (TypeError("not a tensor"), False),
    ],
)
def test_an_error_of_this_rank_alone_accuses_no_other(error: Exception, is_named: bool) -> None:
    found = ByLink.lost(SimpleNamespace(_roll_call=_RollCall()), error)  # type: ignore[arg-type]
    assert isinstance(found, LostRankError) if is_named else found is error


def test_ranks_outside_of_the_group_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(lost, "EVERY", 0.02)
    monkeypatch.setattr(lost, "GRACE", 1.0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 2])
    calls = []
    for rank in (0, 2):
        monkeypatch.setattr(compat, "process_group_store", lambda rank=rank: (rank, 4, store))
        calls.append(RollCall(SimpleNamespace(group_name="a group of two")))  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda call: str(call.lost(RuntimeError("closed"))), calls))
    assert all("all ranks answer" in each for each in said), said


def test_the_thread_that_answers_ends_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "EVERY", 0.02)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(compat, "process_group_store", lambda: (0, 2, dist.HashStore()))
    before = set(threading.enumerate())
    roll_call = RollCall(SimpleNamespace(group_name="two"))  # type: ignore[arg-type]
    (thread,) = set(threading.enumerate()) - before
    assert thread.is_alive()
    del roll_call
    thread.join(5)
    assert not thread.is_alive()
