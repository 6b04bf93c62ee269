"""The compact allocator: tensors keep their numbers, lie close together, and give back what is not used."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fxprec.runtime.cpu import compact

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the compact allocator is written for Linux"),
    pytest.mark.usefixtures("region"),
]

KIB, MIB = 1024, 1024 * 1024


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
    peak = highest = 0
    for _ in range(5):
        saved = list[torch.Tensor]()
        for kib in sizes:  # forward: one of three is saved, the others are temporaries
            temporary = block(kib)
            if chance.random() < 1 / 3:
                saved.append(temporary)
            peak = max(peak, sum(t.nbytes for t in saved) + temporary.nbytes)
            highest = max(highest, compact.sizes().end)
        while saved:
            block(chance.choice(sizes))
            saved.pop()
    assert highest - start < 1.2 * peak


def test_the_lowest_place_that_fits_is_taken_among_many() -> None:
    """Against a search of every hole, in the order of addresses."""
    chance, end = random.Random(1), compact.sizes().end
    live, holes = dict[int, torch.Tensor](), list[tuple[int, int]]()
    base = block(16).data_ptr()
    for _ in range(2000):
        if live and chance.random() < 0.5:
            at = chance.choice(list(live))
            holes = _joined([*holes, (at, live.pop(at).nbytes)])
            continue
        tensor = torch.empty(chance.choice((16, 17, 40, 100, 333)) * KIB, dtype=torch.uint8)
        last = max((a + t.nbytes for a, t in live.items()), default=base)
        expected, room = next(((a, n) for a, n in holes if n >= tensor.nbytes and a < last), (last, 0))
        assert tensor.data_ptr() == expected
        holes = [hole for hole in holes if hole[0] != expected]
        if room > tensor.nbytes:
            holes = _joined([*holes, (expected + tensor.nbytes, room - tensor.nbytes)])
        live[expected] = tensor
        del tensor
    live.clear()
    assert compact.sizes().end == end


def _joined(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found = list[tuple[int, int]]()
    for start, size in sorted(holes):
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((start, size))
    return found


def test_many_small_tensors_cost_as_much_as_few() -> None:
    """Holes that fit nothing are no longer passed one by one."""
    few, many = _seconds(holes=500), _seconds(holes=30_000)
    assert many < 20 * few


def _seconds(holes: int) -> float:
    kept = [torch.empty(16 * KIB, dtype=torch.uint8) for _ in range(2 * holes)]
    del kept[::2]  # every other one is a hole that the tensors timed do not fit
    start = time.process_time()
    timed = [torch.empty(32 * KIB, dtype=torch.uint8) for _ in range(200)]
    seconds = time.process_time() - start
    del timed
    return seconds


def test_as_much_as_is_live_stays_for_the_next_step() -> None:
    compact.trim()
    before, kept = resident(), block(100 * KIB)
    freed = block(90 * KIB)
    del freed
    assert resident() - before > 180 * MIB
    assert compact.sizes().idle > 80 * MIB
    assert kept.nbytes == 100 * MIB


_FREED = """
import os, torch
from fxprec.runtime.cpu import compact
assert compact.install() is None
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") // 2**20
before, large = resident(), torch.ones(400 << 20, dtype=torch.uint8)
above = torch.full((4 << 20,), 7, dtype=torch.uint8)
assert large.data_ptr() < above.data_ptr()
held = resident()
del large
freed = resident()
compact.trim()
print(held - before, freed - before, resident() - before, bool((above == 7).all()))
"""


def test_memory_freed_below_a_live_tensor_goes_back_at_once() -> None:
    """Where the tensor above keeps the end of the region up, and nothing is allocated afterwards; in MiB."""
    done = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    held, freed, trimmed, kept = done.stdout.split()
    assert int(held) >= 404
    assert int(freed) < 80
    assert int(trimmed) < 16
    assert kept == "True"


def test_a_tensor_beyond_the_memory_is_torchs_error(region: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("this system promises any memory")
    for size in (4 * memory, 2**45):
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
            torch.empty(size, dtype=torch.uint8)
    assert compact.sizes().live == region
    assert bool((block(64, 3) == 3).all())


_LIMITED = """
import resource, torch
from fxprec.runtime.cpu import compact
compact._library()  # a compiler is a process of its own, under the same limit
limit = {gib} << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(compact.install())
print(torch.ones(1 << 20).sum().item(), compact.is_installed())
rest = torch.empty(4 << 30, dtype=torch.uint8)  # as much as any process of that limit has beside
"""


@pytest.mark.parametrize(
    ("gib", "said", "installs"),
    [(20, "the system does not give this process 32 GiB of addresses (ulimit -v), of which half is used", False),
     (40, "None", True)],
)  # fmt: skip
def test_half_of_limited_addresses_are_taken_or_none(gib: int, said: str, installs: bool) -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED.format(gib=gib)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [said, f"1048576.0 {installs}"]


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
