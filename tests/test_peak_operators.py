"""Many operators under a tight ``peak_budget``: whatever is computed again, gradients are those of eager float32."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import Cnn, weighted_sum
from torch import Tensor, nn

from fxprec import Backend, BudgetError, Config

Operator = Callable[[Tensor], Tensor]
ROWS, WIDTH = 256, 64  # products large enough for 16-bit GEMMs, where the processor has them


class Between(nn.Module):
    """An operator between two layers."""

    def __init__(self, first: nn.Module, last: nn.Module, operator: Operator) -> None:
        super().__init__()
        self.first, self.last, self.operator = first, last, operator

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.operator(torch.relu(self.first(x)))))


class ReadLate(nn.Module):
    """An input that the last layer multiplies, too: backward reads its 8-bit copy before what it computes again."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.first, self.last, self.operator = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), operator

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(F.silu(self.first(self.operator(x))))
        return self.last(x) * y + y


class Loss(nn.Module):
    """A loss behind two layers and a norm."""

    def __init__(self, loss: Operator) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.last(rms(F.gelu(self.first(x))) + x))


class Cells(nn.Module):
    """Four steps of an LSTM's cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), WIDTH)
        for i in range(4):
            h, c = self.cell(x * (i + 1) / 4, (h, c))
        return self.last(h)


class Experts(nn.Module):
    """A sum of four small networks, weighed by a fifth."""

    def __init__(self) -> None:
        super().__init__()
        wide = 2 * WIDTH
        self.gate, self.norm = nn.Linear(WIDTH, 4), nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return self.norm(sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)) + x)


class Dense(nn.Module):
    """Each convolution reads what all before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 * i, 8, 3, padding=1) for i in range(1, 4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 * i) for i in range(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            found.append(layer(F.relu(norm(torch.cat(found, 1)))))
        return torch.cat(found, 1)


class Residual(nn.Module):
    """Layers that all read the input."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = h + torch.tanh(layer(norm(h))) * x
        return h


class Chain(nn.Module):
    """What torch's own tests of a memory budget compile."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 8 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.relu(x) @ weight
        return x


def rms(x: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def labels() -> Tensor:
    return torch.arange(ROWS) % WIDTH


def resized(**options: Any) -> Operator:
    return lambda x: F.interpolate(x, **options)


def upsampled_twice(x: Tensor) -> Tensor:
    return F.interpolate(F.interpolate(x, scale_factor=2), size=(40, 40), mode="bilinear")


def beside_a_skip(x: Tensor) -> Tensor:
    return torch.cat([x[:, :8], F.interpolate(F.max_pool2d(x[:, 8:], 2), size=x.shape[2:], mode="bilinear")], 1)


ON_ROWS: dict[str, Operator] = {
    "rms": rms,
    "power": lambda x: (x.abs() + 0.1) ** 1.5,
    "cumsum": lambda x: x.cumsum(0) / 8,
    "softmax": lambda x: x.softmax(-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "sort": lambda x: x.sort(-1).values,
}
ON_IMAGES: dict[str, Operator] = {
    "group_norm": nn.GroupNorm(4, 16),
    "instance_norm": nn.InstanceNorm2d(16),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 5),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 5),
    "transposed": nn.ConvTranspose2d(16, 16, 2, 2),
    "nearest to size": resized(size=(24, 20)),
    "nearest down": resized(size=7),
    "nearest by 2": resized(scale_factor=2),
    "nearest by 1.5": resized(scale_factor=1.5),
    "bilinear to size": resized(size=32, mode="bilinear"),
    "bilinear down": resized(scale_factor=0.5, mode="bilinear"),
    "bilinear corners": resized(scale_factor=2, mode="bilinear", align_corners=True),
    "bicubic to size": resized(size=20, mode="bicubic"),
    "bicubic down": resized(size=9, mode="bicubic"),
    "area": resized(size=12, mode="area"),
    "upsampled twice": upsampled_twice,
    "beside a skip": beside_a_skip,
}
LOSSES: dict[str, Operator] = {
    "cross_entropy": lambda y: F.cross_entropy(y, labels()),
    "nll": lambda y: F.nll_loss(y.log_softmax(-1), labels()),
    "huber": lambda y: F.huber_loss(y, torch.ones(ROWS, WIDTH)),
    "kl": lambda y: F.kl_div(y.log_softmax(-1), torch.ones(ROWS, WIDTH) / WIDTH, reduction="batchmean"),
}


def on_rows(make: Callable[[], nn.Module]) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    return make, (ROWS, WIDTH)


def on_images(make: Callable[[], nn.Module], channels: int = 8) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    return make, (4, channels, 16, 16)


def convolutions(operator: Operator) -> nn.Module:
    return Between(nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1), operator)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{f"late {name}": on_rows(lambda f=f: ReadLate(f)) for name, f in ON_ROWS.items()},
    **{name: on_images(lambda f=f: convolutions(f)) for name, f in ON_IMAGES.items()},
    **{name: on_rows(lambda f=f: Loss(f)) for name, f in LOSSES.items()},
    "cells": on_rows(Cells),
    "experts": on_rows(Experts),
    "dense": on_images(Dense),
    "batch norm": on_images(Cnn, 3),
    "residual layer norm": on_rows(lambda: Residual(nn.LayerNorm)),
    "residual rms norm": on_rows(lambda: Residual(nn.RMSNorm)),
    "chain": on_rows(Chain),
}


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5), requires_grad=True)
    model.zero_grad()
    weighted_sum(run(x)).backward()
    return torch.cat([t.grad.flatten().double() for t in (*model.parameters(), x) if t.grad is not None])


def planned(name: str, budget: int | str, cpu: str) -> float:
    """Compile for a budget; return the gradient's cosine with eager float32. Raises `BudgetError`."""
    torch.compiler.reset()
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make()
    wanted = gradients(reference := copy.deepcopy(model), reference, shape)
    backend = Backend(Config(recipe="fp8", lowering="eager", peak_budget=budget, cpu=cpu))
    found = gradients(model, torch.compile(model, backend=backend), shape)
    peak = backend.plans[0].peak_bytes
    assert peak is not None
    assert peak.planned <= peak.budget
    return float(found @ wanted / found.norm() / wanted.norm())


GATE = (
    *(
        "late rms",
        "late power",
        "late cumsum",
        "group_norm",
        "max_pool",
        "transposed",
        "nearest to size",
        "nearest down",
    ),
    *("bilinear to size", "bicubic down", "beside a skip", "cross_entropy", "cells", "experts", "dense"),
    *("residual layer norm", "residual rms norm", "chain"),
)
"""Networks of each kind; all of them, on both kinds of processor, under ``-m full``."""


def cells() -> list[Any]:
    kinds = ((name, cpu) for name in NETWORKS for cpu in ("avx512+bf16", "avx2"))
    is_in_gate = {(name, ("avx512+bf16", "avx2")[i % 2]) for i, name in enumerate(GATE)}
    return [pytest.param(*kind, marks=() if kind in is_in_gate else pytest.mark.full) for kind in kinds]


@pytest.mark.parametrize(("name", "cpu"), cells())
def test_gradients_under_the_least_budget_are_those_of_eager_float32(name: str, cpu: str) -> None:
    with pytest.raises(BudgetError, match=r"the lowest peak found is .* which includes .*; raise it to") as error:
        planned(name, 1, cpu)
    found = re.search(r"raise it to .*?(\d+) bytes", str(error.value))
    assert found is not None
    assert planned(name, int(found[1]), cpu) > 0.995


@pytest.mark.parametrize(
    "name",
    ["chain", "cells", *(pytest.param(n, marks=pytest.mark.full) for n in ("dense", "experts", "transposed", "kl"))],
)
def test_everything_kept_is_always_within_reach(name: str) -> None:
    assert planned(name, "100%", "avx2") > 0.995
