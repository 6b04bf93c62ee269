"""Helpers of the backend's tests: nearly exact formats, small models, a comparison with uncompiled float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxprec import Backend, Config, Recipe

# Everything goes through quantize and dequantize, yet a wrong value stands out: 18 mantissa bits.
FINE = Recipe(hi="1-8-22", lo_forward="1-8-18", lo_backward="1-8-18", name="fine")
FINE_TOLERANCE = 5e-5
STORED = ("packed", "simulate")
STORAGES = ("packed", "simulate", "native")


def eager_backend(storage: str, **options: Any) -> Backend:
    """A backend with the reference lowering; nearly exact formats unless told otherwise."""
    return Backend(Config(**{"recipe": FINE, "low_ratio": 0.6, "lowering": "eager", "storage": storage, **options}))


def narrow_recipe(storage: str) -> str:
    return "fp8" if storage == "native" else "hfp8"


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """L2 distance over L2 norm; absolute where ``wanted`` is close to zero."""
    found, wanted = (_as_doubles(x.detach()) for x in (found, wanted))
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-3)) if wanted.numel() else 0.0


def _as_doubles(x: Tensor) -> Tensor:
    x = x.to_dense() if x.layout is not torch.strided else x
    return torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double()


def assert_close(found: Any, wanted: Any, what: str, tolerance: float = FINE_TOLERANCE) -> None:
    if not isinstance(wanted, Tensor):
        assert found == wanted, what
        return
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    assert found.requires_grad == wanted.requires_grad, what
    error = relative_error(found, wanted)
    assert error < tolerance, f"{what}: relative error {error:.3g}"


def weighted_sum(outputs: Any) -> Tensor:
    """A scalar whose gradient differs for every element of every output."""
    weights = torch.Generator().manual_seed(1)
    differentiable = [o for o in tree_leaves(outputs) if isinstance(o, Tensor) and o.requires_grad]
    return sum(((o.float() * torch.randn(o.shape, generator=weights)).sum() for o in differentiable), torch.zeros(()))


def compare(
    make: Callable[[], nn.Module],
    batches: Sequence[tuple[Any, ...]],
    backend: Backend,
    *,
    call: Callable[..., Any] = lambda model, *inputs: model(*inputs),
    input_gradients: bool = False,
    backward: bool = True,
    tolerance: float = FINE_TOLERANCE,
    **compile_options: Any,
) -> tuple[nn.Module, nn.Module]:
    """Run forward and backward on each batch, compiled and not; assert that outputs, gradients and buffers agree.

    Returns (compiled, reference).
    """
    reference = make()
    own = copy.deepcopy(reference)
    compiled = torch.compile(own, backend=backend, **compile_options)
    for batch in batches:
        results = []
        for model in (compiled, reference):
            inputs = [_fresh_input(value, input_gradients) for value in batch]
            outputs = call(model, *inputs)
            if backward:
                weighted_sum(outputs).backward()
            results.append((tree_leaves(outputs), inputs))
        (found, found_inputs), (wanted, wanted_inputs) = results
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_close(a, b, f"output {i}", tolerance)
        for i, (a, b) in enumerate(zip(found_inputs, wanted_inputs, strict=True)):
            assert_close(a, b, f"input {i} afterwards", tolerance)
            assert_close(getattr(a, "grad", None), getattr(b, "grad", None), f"gradient of input {i}", tolerance)
    for (name, a), b in zip(own.named_parameters(), reference.parameters(), strict=True):
        assert_close(a.grad, b.grad, f"gradient of {name}", tolerance)
    for (name, a), b in zip(own.named_buffers(), reference.buffers(), strict=True):
        assert_close(a, b, f"buffer {name}", tolerance)
    return compiled, reference


def _fresh_input(value: Any, with_gradient: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone().requires_grad_(with_gradient and value.is_floating_point())


def mlp() -> nn.Module:
    """(batch, 16) to (batch, 4), three GEMMs."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))


class Cnn(nn.Module):
    """(batch, 3, height, width) to (batch, 5): batch norm, an in-place ReLU, a residual add; three GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(x + self.bn2(self.conv2(x)))
        return self.classifier(x.mean((2, 3)))


class Loud(nn.Module):
    """(batch, 16) to (batch, 4) with activations 1e4 times too large for 8 bits; three GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x * 1e4))
        return self.third(F.relu(self.second(x))) * 1e-4
