"""Copies to pinned host memory on a stream of their own: what is ordered before what, on recorded streams and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fxprec
from fxprec.runtime import host
from fxprec.runtime.host import Lane
from fxprec.runtime.pinned import PinnedPool

CPU = torch.device("cpu")


@dataclass(eq=False)
class Stream:
    """What a stream's next operation comes after: by each stream, how many of its operations."""

    name: str
    gpu: Gpu
    clock: dict[str, int] = field(default_factory=dict)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: dict[str, int]) -> None:
        self.clock = {name: max(self.clock.get(name, 0), event.get(name, 0)) for name in {*self.clock, *event}}

    def record_event(self) -> dict[str, int]:
        return dict(self.clock)

    def synchronize(self) -> None:
        self.gpu.synchronized += 1

    def run(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Enqueue an operation. It races with any other on the same memory that it does not come after, if one writes."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        for tensor, is_write in [(t, False) for t in reads] + [(t, True) for t in writes]:
            for name, count, wrote in self.gpu.touched.setdefault(tensor.data_ptr(), []):
                if (is_write or wrote) and self.clock.get(name, 0) < count:
                    self.gpu.races.append(f"{self.name} {'writes' if is_write else 'reads'} beside {name}")
            self.gpu.touched[tensor.data_ptr()].append((self.name, self.clock[self.name], is_write))


@dataclass(eq=False)
class Gpu:
    """A device whose streams are clocks."""

    touched: dict[int, list[tuple[str, int, bool]]] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)
    synchronized: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    pinned_ever: int = 0
    error: int = 0

    def __post_init__(self) -> None:
        self.compute = self.current = Stream("compute", self)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def register(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
            self.pinned_ever += 1
        return self.error

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    calls = SimpleNamespace(cudaHostRegister=found.register, cudaHostUnregister=found.unregister)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    copy = Tensor.copy_

    def copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        found.current.run([source], [to])
        return copy(to, source)

    monkeypatch.setattr(Tensor, "copy_", copy_)
    return found


@pytest.fixture
def lane(gpu: Gpu) -> Lane:
    stream: Any = Stream("copies", gpu)
    return Lane(CPU, stream, PinnedPool(CPU, stream))


def test_the_copy_out_comes_behind_its_kernel_and_nothing_waits_for_it_before_it_is_told_to(
    gpu: Gpu, lane: Lane
) -> None:
    x = torch.randn(8, 4).T
    gpu.compute.run([], [x])
    waiting = lane.send(x)
    gpu.compute.run([x], [])  # another reader, beside the copy
    assert "copies" not in gpu.compute.clock, "kernels run on"
    lane.wait_sent(waiting)
    gpu.compute.run([], [x])  # its memory again
    assert gpu.races == []
    assert torch.equal(waiting, x)
    assert waiting.stride() == x.stride()


def test_memory_used_again_before_the_wait_is_a_race(gpu: Gpu, lane: Lane) -> None:
    """The stub sees what it is there to see."""
    x = torch.randn(8)
    gpu.compute.run([], [x])
    kept = lane.send(x)
    gpu.compute.run([], [x])
    assert gpu.races == ["compute writes beside copies"]
    assert kept.shape == x.shape


def test_what_comes_back_is_read_behind_its_copy_and_written_behind_what_read_its_memory(gpu: Gpu, lane: Lane) -> None:
    x = torch.randn(8)
    gpu.compute.run([], [x])
    waiting = lane.send(x)
    lane.wait_sent(waiting)
    wanted = x.clone()
    back = lane.fetch(waiting)
    gpu.compute.run([], [])  # a kernel beside the copy
    assert gpu.compute.clock["copies"] == 1, "kernels run on"
    lane.wait_fetched(back)
    gpu.compute.run([back], [])
    assert gpu.races == []
    assert torch.equal(back, wanted)
    assert lane.arriving == {}


def test_a_kernel_before_the_wait_reads_too_early(gpu: Gpu, lane: Lane) -> None:
    back = lane.fetch(lane.send(torch.randn(8)))
    gpu.compute.run([back], [])
    assert gpu.races == ["compute reads beside copies"]


def step(lane: Lane, gpu: Gpu, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Run a forward: return what waits, and what it should be."""
    torch.manual_seed(seed)
    values = [torch.randn(64), torch.randn(64), torch.randn(16).to(torch.bfloat16), torch.randn(8) > 0]
    waiting = []
    for x in values:
        gpu.compute.run([], [x])
        waiting.append(lane.send(x))
        lane.wait_sent(waiting[-1])
    return waiting, values


def back(lane: Lane, gpu: Gpu, waiting: list[Tensor]) -> list[Tensor]:
    found = [lane.fetch(each) for each in reversed(waiting)]
    for x in found:
        lane.wait_fetched(x)
        gpu.compute.run([x], [])
    return found[::-1]


def test_pinned_memory_is_allocated_in_the_first_step_and_used_again(gpu: Gpu, lane: Lane) -> None:
    for seed in range(5):
        waiting, values = step(lane, gpu, seed)
        assert all(map(torch.equal, back(lane, gpu, waiting), values))
        del waiting
    assert gpu.pinned_ever == 4
    assert lane.pool.bytes == 64 * 4 * 2 + 16 * 2 + 8, "what is asked for, rounded to nothing"
    assert gpu.races == []


def test_what_waits_is_not_overwritten_by_other_forwards_before_its_backward(gpu: Gpu, lane: Lane) -> None:
    steps = [step(lane, gpu, seed) for seed in range(3)]
    assert gpu.pinned_ever == 3 * 4
    for waiting, values in steps:
        assert all(map(torch.equal, back(lane, gpu, waiting), values))
    views = [waiting[0].view(8, 8) for waiting, _ in steps]
    wanted = [values[0].view(8, 8) for _, values in steps]
    del steps, waiting
    step(lane, gpu, 9)
    assert all(map(torch.equal, views, wanted)), "a view keeps it"
    assert gpu.pinned_ever == 3 * 4, "the rest is lent again"
    assert gpu.races == []


def test_memory_is_lent_again_while_its_copy_back_is_under_way_and_overwritten_behind_it(gpu: Gpu, lane: Lane) -> None:
    x, y = torch.randn(32), torch.randn(32)
    waiting = lane.send(x)
    lane.wait_sent(waiting)
    address = waiting.data_ptr()
    coming = lane.fetch(waiting)
    del waiting
    again = lane.send(y)
    assert again.data_ptr() == address
    lane.wait_fetched(coming)
    assert gpu.races == []


def test_blocks_of_an_earlier_plan_are_given_back_when_others_are_pinned(gpu: Gpu, lane: Lane) -> None:
    for _ in range(4):
        lane.send(torch.randn(100))
    for _ in range(12):
        lane.send(torch.randn(50))
    assert set(gpu.registered.values()) == {400, 200}
    lane.send(torch.randn(70))
    assert set(gpu.registered.values()) == {200, 280}
    assert gpu.synchronized == 1
    assert len(lane.pool.blocks) == len(gpu.registered)


def test_memory_that_cannot_be_pinned_is_said_in_one_line(gpu: Gpu, lane: Lane) -> None:
    gpu.error = 2
    words = (
        r"ways has 'offload', and 32 bytes of host memory cannot be pinned \(cudaHostRegister: error 2\); raise the "
        r"limit of locked memory \(ulimit -l\), or leave 'offload' out"
    )
    with pytest.raises(fxprec.LoweringError, match=words):
        lane.send(torch.randn(8))
    assert lane.pool.blocks == {}


def test_threads_that_offload_first_at_the_same_time_share_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    device, others = torch.device("cuda", 0), []

    def stream(_: torch.device) -> SimpleNamespace:
        """Make a stream; meanwhile another thread asks for the lane."""
        if not others:
            others.append(None)
            others[:] = [Lane.of(device)]
        return SimpleNamespace()

    monkeypatch.setattr(host, "_lanes", {})
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    assert Lane.of(device) is others[0]


def test_on_a_cpu_there_are_no_streams() -> None:
    x = torch.randn(8, 4).T
    waiting = torch.ops.fxprec.offload(x)
    assert torch.ops.fxprec.wait_offload(waiting, x) is not x
    found = torch.ops.fxprec.wait_reload(torch.ops.fxprec.reload(waiting, torch.zeros(1)))
    assert torch.equal(found, x)
    assert found.data_ptr() not in (x.data_ptr(), waiting.data_ptr())
    assert host._lanes == {}
