"""``activation_memory_budget`` in a graph with a kernel that the user wrote in Triton: torch's test has this chain.

Without a GPU PyTorch's relu runs in the kernel's place; torch reads from the kernel's source what the kernel writes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from helpers import eager_backend
from torch import Tensor, nn
from torch.autograd.profiler import profile

triton = pytest.importorskip("triton")
import triton.language as tl
from triton.backends.compiler import GPUTarget

SIDE = 64


@triton.jit
def relu_kernel(source, result, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    x = tl.load(source + places, mask=places < size)
    tl.store(result + places, tl.where(x < 0, 0, x), mask=places < size)


def launched(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    torch.library.wrap_triton(relu_kernel)[(triton.cdiv(x.numel(), 256),)](x, result, x.numel(), 256)
    return result


@torch.library.triton_op("fxprec_tests::triton_relu", mutates_args=())
def triton_relu(x: Tensor) -> Tensor:
    return launched(x)


@torch.library.triton_op("fxprec_tests::triton_relu_of_gradient", mutates_args=())
def triton_relu_of_gradient(grad: Tensor) -> Tensor:
    return launched(grad)


# torch's test has this derivative, which needs no saved value
triton_relu.register_autograd(
    lambda ctx, grad: triton_relu_of_gradient(grad), setup_context=lambda ctx, inputs, output: None
)


class Chain(nn.Module):
    """The kernel, then five times a product and the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(SIDE, SIDE))
        self.weights = nn.ParameterList(torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(5))

    def forward(self) -> Tensor:
        x = triton_relu(self.start)
        for w in self.weights:
            x = triton_relu(torch.mm(x, w))
        return x.sum()


@pytest.fixture
def runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: object, source: Tensor, result: Tensor, *_: object, **__: object) -> None:
        result.copy_(source.relu())

    monkeypatch.setattr(triton.JITFunction, "run", run)
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)


def products_of_backward(out: Tensor) -> int:
    with profile(use_kineto=False) as events:
        out.backward()
    return sum(event.name == "aten::mm" for event in events.function_events)


def step(backend: Any, share: float) -> tuple[int, list[Tensor]]:
    """Return how many products backward computes, and the output and gradients."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Chain()
    with functorch_config.patch(activation_memory_budget=share):
        out = torch.compile(model, backend=backend)()
        products = products_of_backward(out)
    return products, [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kept", range(1, 6))
def test_with_kernels_of_the_users_as_many_products_are_kept_as_fit(kept: int, runs_without_a_gpu: None) -> None:
    """The kernel's first result is computed again from the parameter. Each of the other four takes a product."""
    backend = eager_backend(recipe="bf16")
    products, found = step(backend, kept / 5)
    of_torch, exact = step("aot_eager_decomp_partition", kept / 5)
    assert products == 10 + max(4 - kept, 0) <= of_torch
    (plan,) = backend.plans
    assert plan.saved_bytes is not None
    assert plan.saved_bytes.planned <= kept * 2 * SIDE**2
    for mine, of_float32 in zip(found, exact, strict=True):
        assert float((mine - of_float32).norm() / of_float32.norm()) < 0.02


def test_a_kernel_of_the_users_trains_in_fp8(runs_without_a_gpu: None) -> None:
    _, found = step(eager_backend(recipe="fp8", low_ratio=1.0), 1.0)
    _, exact = step("eager", 1.0)
    for mine, of_float32 in zip(found, exact, strict=True):
        assert float((mine - of_float32).norm() / of_float32.norm()) < 0.1
