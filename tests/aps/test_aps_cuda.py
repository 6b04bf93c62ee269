"""The exchange on a GPU without one: one launch whatever the layers, no second upload, a stream beside backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import interpreted
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from fxprec.runtime.aps import bucket, coder, fsdp, hook, segments, segments_triton
from fxprec.runtime.aps.layout import bounds_of, layout
from fxprec.runtime.aps.shards import Shards
from fxprec.runtime.aps.wire import Sending, wire_of

SIZES = (5, 0, 3000, 1, 1024, 0, 700)
GPU = torch.device("cuda", 0)


def pieces() -> Tensor:
    """Layers of very different sizes, with zeros, an inf, a NaN and subnormal numbers."""
    g = torch.Generator().manual_seed(0)
    layers = [torch.randn(n, generator=g) * 10.0 ** (9 * k - 27) for k, n in enumerate(SIZES)]
    layers[0][:] = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 0.0])
    layers[3][0] = -torch.inf
    layers[4][17] = -torch.nan
    return torch.cat(layers)


@interpreted
def test_kernels_over_pieces_have_the_bits_of_the_plain_form() -> None:
    bounds, flat = bounds_of(SIZES), pieces()
    _, programs = segments_triton.table_of(bounds, torch.device("cpu"))
    assert programs == 1 + 3 + 1 + 1 + 1
    with np.errstate(all="ignore"):
        found = segments_triton.largest_magnitudes(flat, bounds)
        wanted = segments.largest_magnitudes(flat, bounds)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)) or same_but_nan(found, wanted)
        powers = torch.tensor([200, 3, -7, 0, -215, 1, 126], dtype=torch.int32)
        mask = torch.tensor([1.0, 1.0, 0.0, 1.0, torch.nan, 1.0, 1.0])
        for given in (None, mask):
            mine, theirs = flat.clone(), flat.clone()
            segments_triton.scale_by_powers(mine, bounds, powers, given)
            segments.scale_by_powers(theirs, bounds, powers, given)
            assert same_but_nan(mine, theirs)
        before = flat.clone()
        segments_triton.scale_by_powers(flat, [(3, 40)], torch.tensor([1]))
        assert torch.equal(flat[3:40], before[3:40] * 2)
        assert torch.equal(flat[40:].nan_to_num(), before[40:].nan_to_num()), "what is of no piece stays"


def first_chunk_of_both(out: Tensor, given: Tensor, group: object) -> None:
    out.view(2, -1)[:] = given.view(2, -1)[0]


@interpreted
@pytest.mark.parametrize("fmt", ["e5m2", "1-4-3", "dynamic-tree"])
@pytest.mark.parametrize("options", [{}, {"error_feedback": True}, {"accumulate": "format"}])
def test_a_bucket_has_the_bits_of_a_cpus(monkeypatch: pytest.MonkeyPatch, fmt: str, options: dict[str, Any]) -> None:
    """Of two ranks with the same gradients: what this one sends to itself is what the other sends."""
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(bucket.dist, "all_reduce", lambda *args, **options: work)
    monkeypatch.setattr(bucket.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(bucket.dist, "all_to_all_single", first_chunk_of_both)
    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(segments, "_on_gpu", lambda flat, on_gpu=on_gpu: on_gpu)
        monkeypatch.setattr(coder.kernels, "usable", lambda *tensors, on_gpu=on_gpu: not on_gpu)
        state, flat = state_of(fmt, **options), pieces()
        low = [layer for layer in flat.split(SIZES) if layer.numel()]
        owners = [object() for _ in low]
        one = bucket.Exchange(state, bucket.Part(0, low, owners, Sending(state.wire)))
        with np.errstate(all="ignore"):
            for stage in ("start", "prepare", "scatter", "reduce"):
                getattr(one, stage)()
            one.message = torch.stack([one.message] * 2)
            one.finish()
        found.append(torch.cat([flat, *(state.residuals[owner] for owner in owners if options.get("error_feedback"))]))
    assert same_but_nan(*found)
    assert bool(found[0].isnan().any())
    assert int(found[0].isfinite().sum()) > 3000


def same_but_nan(a: Tensor, b: Tensor) -> bool:
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("arch", [80, 90, *(pytest.param(arch, marks=pytest.mark.full) for arch in (89, 100))])
def test_the_kernels_compile(arch: int) -> None:
    largest, scaled = segments_triton.compile_to_ptx(arch)
    assert "max.s32" in largest
    assert "mul.f32" in scaled or "mul.rn.f32" in scaled


class Launches(TorchDispatchMode):
    """Counts operators, and launches of the kernels that it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, grid: Any) -> Any:
        self.kernels += 1
        return lambda *args, **options: None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """A CPU's tensors on a GPU's way; its kernels, and process groups, do nothing."""
    found = Launches()
    monkeypatch.setattr(segments, "_on_gpu", lambda flat: True)
    monkeypatch.setattr(coder.kernels, "usable", lambda *tensors: False)
    for name in ("_largest_kernel", "_scale_kernel"):
        monkeypatch.setattr(segments_triton, name, found)
    monkeypatch.setattr(segments.on_device, "uploaded_for_good", uploads.of)
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(bucket.dist, "all_reduce", lambda *args, **options: work)
    monkeypatch.setattr(bucket.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(bucket.dist, "all_to_all_single", lambda out, given, group: None)
    monkeypatch.setattr(bucket.dist, "get_rank", lambda group: 0)
    for cached in (segments_triton.table_of, segments.indices_of):
        cached.cache_clear()
    uploads.seen.clear()
    yield found
    for cached in (segments_triton.table_of, segments.indices_of):
        cached.cache_clear()


class Uploads:
    """Stands for an upload that is made once."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def of(self, x: Tensor, device: torch.device) -> Tensor:
        self.seen.append(tuple(x.shape))
        return x


uploads = Uploads()
OPTIONS = {"accumulate": "fp32", "scaling": "aps", "error_feedback": False, "group_size": None}
GROUPS = SimpleNamespace(size=2, rank=0, exponents=None, payload=None, gather=None, parts=None, node=None)


def state_of(fmt: str, **options: Any) -> Any:
    chosen = SimpleNamespace(**OPTIONS | options)
    wire, random = wire_of(fmt), lambda *args: None
    return SimpleNamespace(options=chosen, groups=GROUPS, wire=wire, residuals={}, step=0, random=random, by_link=None)


def exchange(layers: int, launches: Launches, **options: Any) -> tuple[int, int]:
    """Kernels and operators of one bucket's way through all stages."""
    state = state_of("e5m2", **options)
    flat = torch.empty(layers * 300)
    low = list(flat.split(300))
    one = bucket.Exchange(state, bucket.Part(0, low, [object()] * layers, Sending(state.wire)))
    before = launches.kernels, launches.operators
    with launches:
        one.start()
        one.prepare()
        one.scatter()
        one.reduce()
        one.message = torch.zeros(2, one.message.numel(), dtype=torch.uint8)  # gathered
        one.finish()
    return launches.kernels - before[0], launches.operators - before[1]


def test_a_buckets_launches_do_not_grow_with_its_layers(launches: Launches) -> None:
    """It was a norm and four multiplications a layer and piece."""
    few, many = ([exchange(layers, launches) for _ in range(2)][1] for layers in (2, 200))  # uploads are in the first
    assert few == many
    assert many[0] == 5, "two largest magnitudes, three scalings"


def test_a_layout_is_uploaded_once(launches: Launches) -> None:
    exchange(8, launches)
    first = list(uploads.seen)
    assert sorted(first) == [(4, 3), (8,), (8, 3)], "this rank's pieces, the layer of each piece, layers and pieces"
    for _ in range(3):
        exchange(8, launches)
    assert uploads.seen == first


def test_fsdp_scales_all_shards_in_one_launch(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches a layer and rank: thousands a module on 64 ranks."""
    state = SimpleNamespace(
        options=SimpleNamespace(**OPTIONS),
        wire=wire_of("e5m2"),
        random=lambda *args: None,
        is_high=lambda step: False,
        by_link=None,
    )
    scatter = fsdp.APSReduceScatter(state, Shards(sizes=(30,) * 20))
    with launches:
        scatter._in_layers(torch.empty(64, 600), 0, None, state.wire)
    assert launches.kernels == 3
    assert uploads.seen == [(64 * 20, 3), (20, 3)]


class Streams:
    """Notes what is asked of streams, and which is the current one."""

    def __init__(self) -> None:
        self.current, self.seen = "backward", list[tuple[str, ...]]()

    @contextmanager
    def made_current(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Named(str):
    """A part that is known by its name."""

    __slots__ = ()
    sending = Sending(None)


def test_backward_runs_ahead_of_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream waits for the bucket, and the future is of the side stream; backward's stream waits for nothing."""
    streams = Streams()

    class Stage:
        STAGES = ("prepare", "finish")
        OF_NODES = ()

        def __init__(self, state: Any, part: str) -> None:
            self.part = part

        def __getattr__(self, name: str) -> Any:
            return lambda: streams.seen.append((name, self.part, streams.current))

    side = SimpleNamespace(name="side", wait_stream=lambda other: streams.seen.append(("waits for", other)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.made_current)
    monkeypatch.setattr(hook, "Exchange", Stage)
    monkeypatch.setattr(hook, "split_bucket", lambda *args: [Named("first"), Named("second")])
    monkeypatch.setattr(hook, "done", lambda buffer: streams.seen.append(("done", streams.current)) or "future")
    state = SimpleNamespace(
        groups=SimpleNamespace(size=2, node=None), step=4, stream=lambda device: side, by_link=None, sending_of=None
    )
    with FakeTensorMode():
        buffer = torch.empty(3, device=GPU)
    whole = SimpleNamespace(
        buffer=lambda: buffer, is_last=lambda: True, index=lambda: 0, gradients=list, parameters=list
    )
    assert hook.aps_hook(state, whole) == "future"
    assert streams.seen == [
        ("waits for", "backward"),
        ("start", "first", "side"),
        ("start", "second", "side"),
        ("prepare", "first", "side"),
        ("finish", "first", "side"),
        ("prepare", "second", "side"),
        ("finish", "second", "side"),
        ("done", "side"),
    ]
    assert streams.current == "backward"
    assert state.step == 5


def test_a_coder_on_a_gpu_scales_in_one_launch(launches: Launches) -> None:
    wire, bounds = coder.Coder(wire_of("1-4-3"), None, True), bounds_of((300,) * 50)
    flat, powers = torch.zeros(15_000), torch.zeros(50, dtype=torch.int32)
    with launches:
        wire.scale_and_encode(flat, bounds, powers)
    assert launches.kernels == 1


def test_layouts_name_the_layer_of_each_piece() -> None:
    lay = layout((3, 5, 2), 2)
    assert lay.layer_of == (0, 1, 1, 2)
