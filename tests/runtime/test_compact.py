"""The compact allocator: tensors keep their numbers, lie close together, and give back what is not used."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxprec
from fxprec.errors import ConfigError, FxprecWarning
from fxprec.runtime.cpu import compact

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the compact allocator is written for Linux")

KIB = 1024


@pytest.fixture(autouse=True)
def region() -> Iterator[int]:
    """Install it; give the bytes that are live in it already. Afterwards new tensors come from the system again."""
    assert compact.install() is None
    gc.collect()
    compact.set_window(1e9)
    filled = _fill_holes()  # that other tests left
    compact.trim()
    yield compact.sizes().live
    del filled
    compact.set_window(10)
    compact.uninstall()


def _fill_holes() -> list[torch.Tensor]:
    """Take every hole of the region that tensors of 16 KiB and more fit, so that new ones lie at its end."""
    filled = list[torch.Tensor]()
    for kib in (1 << i for i in range(20, 3, -1)):
        while True:
            end = compact.sizes().end
            tensor = torch.empty(kib * KIB, dtype=torch.uint8)
            if compact.sizes().end > end:
                break
            filled.append(tensor)
    return filled


def block(kib: int, value: int = 0) -> torch.Tensor:
    return torch.full((kib * KIB,), value, dtype=torch.uint8)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_live_bytes_are_those_of_tensors_of_16_kib_and_more(region: int) -> None:
    small, large = block(15), block(40)
    assert compact.sizes().live - region == large.nbytes
    del small, large
    assert compact.sizes().live == region


def test_the_lowest_place_that_fits_is_taken() -> None:
    first, wall, second, end = block(64), block(16), block(32), block(16)
    low, high = first.data_ptr(), second.data_ptr()
    assert low < wall.data_ptr() < high < end.data_ptr()
    del second, first
    again = block(32)  # fits both holes
    assert again.data_ptr() == low
    wider = block(48)  # fits neither: the first has 32 KiB left
    assert wider.data_ptr() not in (low + again.nbytes, high)


def test_neighbouring_holes_become_one() -> None:
    blocks = [block(32) for _ in range(4)]
    start = blocks[0].data_ptr()
    del blocks[1], blocks[0], blocks[0]  # the second, then the first, then the third: joined from both sides
    assert block(96).data_ptr() == start


@pytest.mark.parametrize("seed", range(4))
def test_no_tensor_overwrites_another(seed: int, region: int) -> None:
    chance, held = random.Random(seed), list[tuple[torch.Tensor, int]]()
    peak = 0
    for step in range(1500):
        if held and chance.random() < 0.5:
            tensor, value = held.pop(chance.randrange(len(held)))
            assert bool((tensor == value).all())
        else:
            value = step % 251
            held.append((block(chance.choice((16, 17, 33, 64, 100, 257, 1024)), value), value))
        peak = max(peak, sum(t.nbytes for t, _ in held))
    assert all(bool((tensor == value).all()) for tensor, value in held)
    assert compact.sizes().live - region >= sum(t.nbytes for t, _ in held)


def test_steps_of_mixed_sizes_stay_close_to_what_is_live() -> None:
    chance, start = random.Random(0), compact.sizes().end
    sizes = [chance.choice((64, 100, 256, 300, 512, 1000, 1024, 2048)) for _ in range(120)]
    peak = 0
    for _ in range(5):
        saved = list[torch.Tensor]()
        for kib in sizes:  # forward: one of three is saved, the others are temporaries
            temporary = block(kib)
            if chance.random() < 1 / 3:
                saved.append(temporary)
            peak = max(peak, sum(t.nbytes for t in saved) + temporary.nbytes)
        highest = compact.sizes().touched
        while saved:
            block(chance.choice(sizes))
            saved.pop()
    assert highest - start < 1.2 * peak


def test_what_is_not_used_goes_back_to_the_system() -> None:
    compact.trim()
    before = resident()
    large = torch.ones(64 * KIB * KIB, dtype=torch.uint8)
    assert resident() - before > 60 * KIB * KIB
    del large
    assert resident() - before > 60 * KIB * KIB  # the next step will want it
    compact.set_window(0)
    block(16), block(16)  # the first ends the window in which it was used, the second one without
    assert resident() - before < 8 * KIB * KIB
    assert compact.sizes().touched < 60 * KIB * KIB + compact.sizes().end


def test_the_profiler_sees_memory() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        tensor = block(100)
        del tensor
    kineto = profiled.profiler.kineto_results  # type: ignore[union-attr]
    seen = [e.nbytes() for e in kineto.events() if e.name() == "[memory]"]
    assert 100 * KIB in seen
    assert -100 * KIB in seen


def test_threads_share_it(region: int) -> None:
    wrong = list[int]()

    def work(value: int) -> None:
        for _ in range(200):
            tensor = block(20 + value, value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert compact.sizes().live == region


def _in_a_child() -> None:
    torch.set_num_threads(1)  # OpenMP's threads are not the child's
    os._exit(0 if bool((block(20, 7) == 7).all()) and compact.install() is None else 1)


def test_a_fork_goes_on() -> None:
    """While another thread allocates: the child's lock must not be held by a thread that it has not."""
    thread = threading.Thread(target=compact.hold, args=(1.0,))
    thread.start()
    time.sleep(0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
        child = multiprocessing.get_context("fork").Process(target=_in_a_child)
        child.start()
    child.join(60)
    thread.join()
    assert child.exitcode == 0


def anonymous() -> int:
    """Bytes of this process in memory that no file backs."""
    pages = [int(n) for n in Path("/proc/self/statm").read_text().split()]
    return (pages[1] - pages[2]) * os.sysconf("SC_PAGESIZE")


def _anonymous_in_a_child(send: Any) -> None:
    send.send(anonymous())
    os._exit(0)


def test_a_child_of_fork_keeps_no_free_pages() -> None:
    """Or the parent would have to copy each of them before its next step writes it."""
    kept, free = block(32 * KIB, 1), block(64 * KIB, 1)
    del free
    before = anonymous()
    receive, send = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = multiprocessing.get_context("fork").Process(target=_anonymous_in_a_child, args=(send,))
        child.start()
    assert receive.recv() < before - 56 * KIB * KIB
    child.join(60)
    assert bool((kept == 1).all())


def test_uninstalled_new_tensors_are_the_systems_and_old_ones_stay(region: int) -> None:
    old = block(64, 3)
    compact.uninstall()
    new = block(64)
    assert compact.sizes().live - region == old.nbytes
    assert bool((old == 3).all())
    assert compact.install() is None
    del new, old
    assert compact.sizes().live == region


def trained(**options: object) -> torch.Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    compiled = torch.compile(model, backend="fxprec", options={"recipe": "fp8", "lowering": "eager", **options})
    compiled(torch.randn(128, 64)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_it_is_in_force_where_asked_for_and_changes_no_bit(region: int) -> None:
    compact.uninstall()
    plain = trained(allocator="system")
    assert compact.sizes().live == region
    assert torch.equal(trained(allocator="compact"), plain)
    held = block(64)
    assert compact.sizes().live >= region + held.nbytes


@pytest.mark.parametrize("options", [{}, {"peak_budget": "90%"}])
def test_a_model_on_a_cpu_brings_it_unless_the_system_is_asked_for(region: int, options: dict[str, object]) -> None:
    compact.uninstall()
    trained(allocator="system", **options)
    held = block(64)
    assert compact.sizes().live == region
    trained(**options)
    more = block(64)
    assert compact.sizes().live >= region + more.nbytes
    del held


def test_why_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "_library", lambda: (_ for _ in ()).throw(RuntimeError("no compiler\nfound")))
    with pytest.warns(
        FxprecWarning, match=r"allocator='compact'.*did not compile \(no compiler\); resident memory may"
    ):
        trained(allocator="compact")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxprecWarning)
        trained()  # nobody asked for it
    monkeypatch.undo()


def test_a_misspelt_allocator_teaches() -> None:
    with pytest.raises(ConfigError, match=r"unknown allocator 'compct'.*'compact', 'system', or None"):
        fxprec.Config(allocator="compct")  # type: ignore[arg-type]
