"""Compiled models keep nothing alive: not the first batch, not the parameters of a model that is gone."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec import compat

OPTIONS: dict[str, Any] = {"recipe": "hfp8", "low_ratio": 1.0, "lowering": "eager", "storage": "packed"}


class Net(nn.Module):
    """(batch, 8) to (batch, 4), with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale


def by_name(model: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(model, backend="fxprec", options=options)


def by_instance(model: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(model, backend=fxprec.Backend(fxprec.Config(**options)))


def in_place(model: nn.Module, options: dict[str, Any]) -> Any:
    model.compile(backend="fxprec", options=options)
    return model


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (by_name, {}),
        (by_name, {"storage": "simulate", "grad_scaling": "dynamic"}),
        (by_name, {"policy": "exact"}),
        (by_instance, {}),
        (in_place, {}),
    ],
)
def test_batches_and_deleted_models_are_freed(make: Any, more: dict[str, Any]) -> None:
    model = Net()
    compiled = make(model, {**OPTIONS, **more})
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "the module": model}
    refs = {name: weakref.ref(value) for name, value in tensors.items()}
    x = torch.randn(4, 8)
    first_batch = weakref.ref(x)
    for _ in range(2):
        compiled(x).sum().backward()
    del x, tensors
    gc.collect()
    assert first_batch() is None, "though the function that made it still runs"
    del model, compiled
    gc.collect()
    assert [name for name, ref in refs.items() if ref() is not None] == []
    # A graph is Dynamo's until its caches are emptied, as any backend's is.


def test_a_model_compiled_again_for_a_promotion_keeps_nothing_either() -> None:
    model = Net()
    backend = fxprec.Backend(fxprec.Config(**OPTIONS))
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(4, 8) * 1e9
    refs = [weakref.ref(value) for value in (x, *model.parameters())]
    for _ in range(3):
        compiled(x).sum().backward()
    assert any(event.kind == "relowering" for event in backend.events)
    del model, compiled, x
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns every 10 microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switching")
def test_threads_share_a_compiled_model() -> None:
    """Storage ``simulate``, where a promotion compiles nothing: torch traces in one thread at a time."""
    backend = fxprec.Backend(fxprec.Config(**{**OPTIONS, "storage": "simulate"}))
    compiled = torch.compile(Net(), backend=backend)
    x = torch.randn(4, 8)
    compiled(x).sum().backward()

    def steps() -> None:
        for _ in range(10):
            compiled(x * 1e9).sum().backward()

    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(steps) for _ in range(4)]:
            result.result()
    assert backend.controllers[0].step == 41
    promotions = [event.site for event in backend.events if event.kind == "promotion"]
    assert promotions
    assert len(promotions) == len(set(promotions)) == len(backend.plans[0].promoted)


def test_code_is_released_once_a_newer_graph_has_taken_over() -> None:
    backend = fxprec.Backend(fxprec.Config(**OPTIONS))
    compiled, x = torch.compile(Net(), backend=backend), torch.randn(4, 8)
    code = []
    for _ in range(5):
        compiled(x).sum().backward()
        code.append(weakref.ref(backend._graphs[-1].compiled.run))
        torch.compiler.reset()
    gc.collect()
    assert [ref() is not None for ref in code] == [False, False, False, False, True]
    assert [controller.step for controller in backend.controllers] == [5], "each graph goes on where the last one was"


def test_a_step_waits_for_no_compilation_of_another_model() -> None:
    """Dynamo's compile lock is one for the process: serving threads stalled while anything compiled."""
    compiled, x = by_instance(Net(), OPTIONS), torch.randn(4, 8)
    for _ in range(2):
        compiled(x).sum().backward()
    with ThreadPoolExecutor(1) as other, compat.compile_lock:
        other.submit(lambda: compiled(x).sum().backward()).result(timeout=60)


def test_what_is_unnoticed_is_no_step_even_if_it_fails() -> None:
    backend = fxprec.Backend(fxprec.Config(**OPTIONS))
    compiled, x = torch.compile(Net(), backend=backend), torch.randn(4, 8)
    for _ in range(2):
        compiled(x).sum().backward()
    controller = backend.controllers[0]

    def fails() -> None:
        with backend.unnoticed():
            checkpoint(compiled, x, use_reentrant=False).sum().backward()
            assert controller.queue.is_muted, "a recomputation mutes too, and ends that alone"
            compiled(x).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert (controller.step, controller.queue.is_muted) == (2, False)
