"""What happens to a run from outside: a full disk, Ctrl-C, a fork, other ranks."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import fxprec
from fxprec.driver import option_checks
from fxprec.driver.event_log import EventLog
from fxprec.driver.saved_state import Identity
from fxprec.passes import pipeline
from tests.aps.aps_ranks import run_ranks
from tests.backend_helpers import Loud, eager_backend

NARROW = {"recipe": "hfp8", "low_ratio": 1.0}


def batch(step: int = 0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


class Training:
    """`Loud` being trained, promotions included."""

    def __init__(self, **options: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.backend = eager_backend("packed", **NARROW, **options)
        self.model = Loud()
        self.compiled = torch.compile(self.model, backend=self.backend)

    def step(self, number: int = 0) -> list[Tensor]:
        self.model.zero_grad()
        loss = self.compiled(batch(number)).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in self.model.parameters())]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def fill_up(folder: Path) -> None:
    """Let every file that training writes end in a device that is full."""
    for name in ("stats.jsonl", "plan.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/full")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_disk_that_fills_up_ends_the_dump_and_not_the_training(tmp_path: Path) -> None:
    reference, dumping = Training(), Training(dump=tmp_path)
    reference.step()
    dumping.step()
    fill_up(tmp_path / "graph-0")
    words = (
        r"^dump: .*graph-0: cannot be written: No space left on device; nothing more of this graph is dumped, and trai"
    )
    with pytest.warns(fxprec.FxprecWarning, match=words) as caught:
        found = [dumping.step(step) for step in range(1, 4)][-1]
    assert len(caught) == 1, "once"
    wanted = [reference.step(step) for step in range(1, 4)][-1]
    assert_same(found, wanted)
    assert dumping.backend.plans == reference.backend.plans, "promotions and all"
    assert dumping.backend.plans[0].promoted
    assert [e.site for e in dumping.backend.events if e.kind == "fallback"] == ["dump"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_under_strict_a_full_disk_is_an_error(tmp_path: Path) -> None:
    training = Training(dump=tmp_path, strict=True)
    training.step()
    fill_up(tmp_path / "graph-0")
    with pytest.raises(fxprec.FallbackError, match="cannot be written: No space left on device"):
        training.step(1)


@contextmanager
def interrupted_in(monkeypatch: pytest.MonkeyPatch, stage: str) -> Iterator[None]:
    """Press Ctrl-C in the middle of a compilation: in the passes, or in lowering a half."""

    def press(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if stage == "passes":
            patch.setattr(pipeline, "run", press)
        else:
            patch.setattr("fxprec.driver.half_compilation.Halves._lower", press)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("stage", ["passes", "lowering"])
def test_ctrl_c_in_a_compilation_leaves_everything_as_it_was(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, training = Training(), Training()
    with interrupted_in(monkeypatch, stage):
        training.step()
    assert training.backend.plans == ()
    wanted, found = reference.step(), training.step()
    assert_same(found, wanted)
    with interrupted_in(monkeypatch, stage):
        training.step(1)  # which compiles again, for a promotion
    state = training.backend.state_dict()
    for step in range(1, 3):
        wanted, found = reference.step(step), training.step(step)
    assert_same(found, wanted)
    assert any(e.kind == "relowering" for e in training.backend.events)
    resumed = Training()
    resumed.backend.load_state_dict(state)
    assert_same(resumed.step(2), wanted)


class Squares(torch.utils.data.Dataset):
    """Computed in the worker, by the compiled model it was forked with."""

    def __init__(self, compiled: Callable[[Tensor], Tensor]) -> None:
        self.compiled = compiled

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        with torch.no_grad():
            return os.getpid(), self.compiled(batch(index))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_workers_forked_after_a_compilation_run_the_compiled_model() -> None:
    training = Training()
    for step in range(3):
        training.step(step)
    with torch.no_grad():
        wanted = [training.compiled(batch(i)) for i in range(4)]
    loader = DataLoader(
        Squares(training.compiled), batch_size=None, num_workers=1, timeout=60, multiprocessing_context="fork"
    )
    pids, found = zip(*loader, strict=True)
    assert os.getpid() not in pids
    assert_same(list(found), wanted)
    assert_same(training.step(3), training.step(3))


TRAINED = Identity(is_training=True, parameters=("first.weight", "first.bias"))


def compile_on(rank: int, store: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr("fxprec.compat.process_group_store", lambda: (rank, 3, store))
    strict = options.pop("strict", False)
    option_checks.tell_of_other_options(fxprec.Config(**options), TRAINED, EventLog("fxprec", strict=strict))


def test_ranks_with_other_options_are_told_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = dist.HashStore()
    compile_on(0, store, monkeypatch, recipe="fp8", low_ratio=0.5)
    compile_on(2, store, monkeypatch, recipe="fp8", low_ratio=0.5, dump=tmp_path)
    words = (
        r"^options: rank 1 compiles this model with other options than rank 0: low_ratio has 0.25 here and 0.5 there; "
        r"ranks that train one model should round alike: give all of them the same options$"
    )
    with pytest.warns(fxprec.FxprecWarning, match=words):
        compile_on(1, store, monkeypatch, recipe="fp8", low_ratio=0.25)
    with pytest.raises(fxprec.FallbackError, match="recipe has 'hfp8' here and 'fp8' there"):
        compile_on(2, store, monkeypatch, recipe="hfp8", low_ratio=0.5, strict=True)


def test_two_models_of_one_rank_may_have_options_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank in range(2):
        for ratio in (0.5, 0.25):
            compile_on(rank, store, monkeypatch, recipe="fp8", low_ratio=ratio)


def test_ranks_that_read_another_plan_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = dist.HashStore()
    for rank, words in enumerate(("{}", "{} ")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "plan.json").write_text(words)
    compile_on(0, store, monkeypatch, plan=tmp_path / "0/plan.json")
    with pytest.warns(fxprec.FxprecWarning, match="plan has other contents"):
        compile_on(1, store, monkeypatch, plan=tmp_path / "1/plan.json")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def exchange(rank: int, world: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch._dynamo.reset()
    model = Net()
    model.compile(backend="fxprec", options={**NARROW, "storage": "simulate", "lowering": "eager", **options})
    return model, DistributedDataParallel(model)


def troubled(rank: int, world: int) -> dict[str, Any]:
    """Other options on rank 1; a NaN that comes in on rank 1 alone."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, wrapped = exchange(rank, world, low_ratio=0.5 + 0.25 * rank)
        wrapped(x).sum().backward()
    told = [str(w.message) for w in caught if "other options" in str(w.message)]
    warnings.simplefilter("ignore")
    _, wrapped = exchange(rank, world, on_nonfinite="raise")
    wrapped(x * (torch.nan if rank == 1 else 1.0)).sum().backward()
    try:
        for _ in range(2):
            wrapped(x).sum().backward()
        ended = "no error"
    except (fxprec.FxprecError, RuntimeError) as error:
        ended = f"{type(error).__name__}: {error}"
    return {"told": told, "ended": ended}


@pytest.fixture(scope="module")
def trouble() -> list[dict[str, Any]]:
    return run_ranks(2, troubled, timeout=30)


def test_other_options_on_a_rank_are_told_by_the_later_one(trouble: list[dict[str, Any]]) -> None:
    (told,) = [line for found in trouble for line in found["told"]]
    assert "low_ratio has" in told


def test_a_nan_on_one_rank_ends_all_in_words(trouble: list[dict[str, Any]]) -> None:
    assert trouble[1]["ended"].startswith("NonfiniteError: ")
    assert trouble[0]["ended"] != "no error"
