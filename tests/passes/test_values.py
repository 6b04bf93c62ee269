"""What a pass may touch: complex numbers, nested graphs, effect tokens, sparse gradients and subclasses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from backend_helpers import STORAGES, STORED, assert_close, compare, eager_backend, weighted_sum
from torch import Tensor, nn
from torch.compiler import nested_compile_region
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fxprec import FallbackError, FxprecWarning

LEFT_ALONE = "ignore:.*(not planned|not rounded|this CPU has no):fxprec.FxprecWarning"
NARROW = 0.1  # relative error of two steps with fp8 operands, on these models at most 0.07


def batches(*shape: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(*shape, generator=generator),) for _ in range(2)]


class Rotary(nn.Module):
    """(batch, 6, 16) to (batch, 6, 4): attention whose queries and keys are turned as Llama's reference code does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        angles = torch.outer(torch.arange(6.0), 0.3 ** torch.arange(4.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.view(-1, 6, 2, 4, 2))
        return torch.view_as_real(pairs * self.turns[:, None]).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.turned(self.query(x)), self.turned(self.key(x))
        weights = torch.softmax(torch.einsum("blhd,bmhd->bhlm", query, key), -1)
        return self.out(torch.einsum("bhlm,bmhd->blhd", weights, key).flatten(2))


class Filter(nn.Module):
    """(batch, 16) to (batch, 4): a filter in the frequency domain, then complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.gain = nn.Parameter(torch.linspace(0.5, 2, 9))
        self.mix = nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(F.relu(self.first(x))) * self.gain, n=16)
        mixed = self.mix(torch.view_as_complex(x.view(-1, 8, 2)))
        return self.last(torch.cat([mixed.real, mixed.imag.exp()], -1))


@pytest.mark.filterwarnings(LEFT_ALONE, "ignore:Torchinductor does not support code generation for complex operators")
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("model", "shape"), [(Rotary, (2, 6, 16)), (Filter, (8, 16))])
def test_gradients_through_complex_values(model: type[nn.Module], shape: tuple[int, ...], storage: str) -> None:
    torch.manual_seed(0)
    native = storage == "native"
    backend = eager_backend(storage, **({"recipe": "fp8"} if native else {}))
    compare(model, batches(*shape), backend, **({"tolerance": NARROW} if native else {}))
    said = [e.detail for e in backend.events if e.kind == "fallback"]
    assert "is torch.complex64: complex values are not planned and keep their precision" in said
    assert {s.kind for s in backend.plans[0].sites} >= {"param", "output", "grad_output"}  # the rest is planned


class Nested(nn.Module):
    """(batch, 16) to (batch, 4), a GEMM in a nested graph between two others."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.run = {"cond": self.branch, "invoke_subgraph": self.region}[inner]

    def branch(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.sin(self.inner(x)), torch.cos, (x,))

    @nested_compile_region
    def region(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.run(F.relu(self.first(x)))))


@pytest.mark.filterwarnings(LEFT_ALONE)
@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("inner", ["cond", "invoke_subgraph"])
def test_nested_graphs_keep_their_precision(inner: str, storage: str) -> None:
    torch.manual_seed(0)
    backend = eager_backend(storage)
    compare(lambda: Nested(inner), batches(8, 16), backend)
    said = [(e.site, e.detail) for e in backend.events if e.kind == "fallback"]
    detail = f"what {inner} runs is not planned and keeps the model's own precision"
    assert [d for _, d in said] == [detail] * len(said)
    assert said
    assert "test_values.py:" in said[0][0]
    assert {"first.weight", "last.weight"} <= {s.tensor for s in backend.plans[0].sites}


def test_nested_graphs_are_an_error_under_strict() -> None:
    model = torch.compile(Nested("cond"), backend=eager_backend("packed", strict=True))
    with pytest.raises(FallbackError, match=r"test_values.py:\d+: what cond runs is not planned"):
        model(*batches(8, 16)[0])


class Inverse(nn.Module):
    """(batch, 16) to (batch, 4); checks of `torch.linalg` are side effects, ordered by tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x @ torch.linalg.inv(x.T @ x + 4 * torch.eye(16)))


@pytest.mark.parametrize("storage", STORED)
def test_effect_tokens_are_no_tensors_of_the_step(storage: str) -> None:
    torch.manual_seed(0)
    backend = eager_backend(storage)
    compare(Inverse, batches(8, 16), backend)
    (plan,) = backend.plans
    assert not any(s.elements == 0 for s in plan.sites)
    gradients = {s.tensor for s in plan.sites if s.kind == "grad_param"}
    assert gradients == ({n for n, _ in Inverse().named_parameters()} if storage == "simulate" else set())


class Words(nn.Module):
    """(batch,) indices to (batch, 4); the table's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x))


def test_sparse_gradients_are_not_rounded() -> None:
    torch.manual_seed(0)
    backend = eager_backend("simulate")
    with pytest.warns(FxprecWarning, match=r"words.weight: its gradient is torch.sparse_coo: it is not rounded"):
        _, reference = compare(Words, [(torch.tensor([1, 5, 1]),)], backend)
    assert reference.words.weight.grad.is_sparse


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("storage", STORED)
def test_tensor_parallel(storage: str, mesh: dist.DeviceMesh) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    backend = eager_backend(storage)
    ours, reference = make(), make()
    compiled = torch.compile(ours, backend=backend)
    for (x,) in batches(8, 16):
        found, wanted = compiled(x), reference(x)
        weighted_sum(found).backward()
        weighted_sum(wanted).backward()
        assert_close(local(found), local(wanted), "output")
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert_close(local(a.grad), local(b.grad), name)
    named = {s.tensor: s.kind for s in backend.plans[0].sites if s.kind == "param"}
    assert {"0.weight", "2.weight"} <= named.keys()  # a shard has its parameter's name


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
