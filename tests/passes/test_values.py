"""What a pass may touch: complex numbers, nested graphs, effect tokens, sparse gradients, subclasses, masks, divisors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from backend_helpers import STORAGES, STORED, assert_close, compare, eager_backend, weighted_sum
from helpers import one_rank
from models import Apply, Parts
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.compiler import nested_compile_region
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec import FallbackError, FxprecWarning
from fxprec.passes.analysis import values
from fxprec.passes.analysis.values import is_plain_float, mark_values

LEFT_ALONE = "ignore:.*(not planned|not rounded):fxprec.FxprecWarning"
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
    backend = eager_backend(storage)
    compare(lambda: Nested(inner), batches(8, 16), backend)
    said = [(e.site, e.detail) for e in backend.events if e.kind == "fallback"]
    detail = f"the code inside {inner} is not planned and keeps the model's own precision"
    assert [d for _, d in said] == [detail] * len(said)
    assert said
    assert "test_values.py:" in said[0][0]
    assert {"first.weight", "last.weight"} <= {s.tensor for s in backend.plans[0].sites}


def test_nested_graphs_are_an_error_under_strict() -> None:
    model = torch.compile(Nested("cond"), backend=eager_backend("packed", strict=True))
    with pytest.raises(FallbackError, match=r"test_values.py:\d+: the code inside cond is not planned"):
        model(*batches(8, 16)[0])


def inverse() -> nn.Module:
    """(batch, 16) to (batch, 4); checks of `torch.linalg` are side effects, ordered by tokens."""
    inverted = Apply(lambda x: x @ torch.linalg.inv(x.T @ x + 4 * torch.eye(16)))
    return nn.Sequential(nn.Linear(16, 16), inverted, nn.Linear(16, 4))


@pytest.mark.parametrize("storage", STORED)
def test_effect_tokens_are_no_tensors_of_the_step(storage: str) -> None:
    backend = eager_backend(storage)
    compare(inverse, batches(8, 16), backend)
    (plan,) = backend.plans
    assert not any(s.elements == 0 for s in plan.sites)
    gradients = {s.tensor for s in plan.sites if s.kind == "grad_param"}
    assert gradients == ({n for n, _ in inverse().named_parameters()} if storage == "simulate" else set())


def words() -> nn.Module:
    """(batch,) indices to (batch, 4); the table's gradient is sparse."""
    return nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4))


def test_sparse_gradients_are_not_rounded() -> None:
    backend = eager_backend("simulate")
    with pytest.warns(FxprecWarning, match=r"0\.weight: its gradient is torch.sparse_coo: it is not rounded"):
        _, reference = compare(words, [(torch.tensor([1, 5, 1]),)], backend)
    assert reference[0].weight.grad.is_sparse


@pytest.mark.filterwarnings(LEFT_ALONE)
def test_calibration_leaves_sparse_gradients_out() -> None:
    backend = eager_backend("packed", policy="exact")
    compare(words, [(torch.tensor([1, 5, 1]),)] * 2, backend)
    assert backend.plans[0].policy == "exact"


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    with one_rank():
        yield init_device_mesh("cpu", (1,))


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
    assert not [s.tensor for s in backend.plans[0].sites if "all_reduce" in s.tensor], "nothing reads what is under way"


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


LEAST = torch.finfo(torch.float32).min


class Masked(nn.Module):
    """(batch, 8, 16) to (batch, 8, 4): attention with a causal mask as the given function builds it."""

    def __init__(self, mask: Callable[[Tensor], Tensor], *, fused: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 4)
        self.mask, self.fused = mask, fused

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = self.mask(allowed)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            mixed = torch.softmax(query @ key.transpose(-1, -2) + mask, -1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


def chosen(allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, LEAST)


def filled(allowed: Tensor) -> Tensor:
    return torch.zeros(1, 1, 8, 8).masked_fill(~allowed, LEAST)[:, :, :, : allowed.shape[-1]]


def multiplied(allowed: Tensor) -> Tensor:
    return (1.0 - allowed.float()) * -1e9


MASKED: dict[str, Callable[[], nn.Module]] = {
    "where": lambda: Masked(chosen),
    "masked_fill": lambda: Masked(filled),
    "product": lambda: Masked(multiplied),
    "fused": lambda: Masked(chosen, fused=True),
}
MASKED_IN_GATE = {("where", s) for s in STORAGES} | {
    ("masked_fill", "native"),
    ("product", "packed"),
    ("fused", "packed"),
}


@pytest.mark.filterwarnings(LEFT_ALONE)
@pytest.mark.parametrize(
    ("name", "storage"),
    [
        pytest.param(name, storage, marks=() if (name, storage) in MASKED_IN_GATE else pytest.mark.full)
        for name in MASKED
        for storage in STORAGES
    ],
)
def test_masks_are_not_promoted(name: str, storage: str) -> None:
    allowed = torch.ones(8, 8, dtype=torch.bool).tril()
    allowed[0] = False  # masked as a whole: with -inf for the least number it would be NaN
    backend = eager_backend(storage, recipe="fp8")
    compare(MASKED[name], [(x, allowed) for (x,) in batches(2, 8, 16)], backend, tolerance=NARROW)
    assert not [e for e in backend.events if e.kind == "promotion"]


@pytest.mark.parametrize(
    ("function", "is_mask"),
    [
        (lambda x, keep: x.masked_fill(keep, float("-inf")), True),
        (lambda x, keep: x + torch.full((8, 8), -1e4).triu(1), True),
        (lambda x, keep: torch.cat([torch.where(keep, x, LEAST), x]).to(torch.bfloat16)[:4], True),
        (lambda x, keep: x * LEAST, True),
        (lambda x, keep: x * 1e4, False),
        (lambda x, keep: x * torch.full((), 1e4), False),
        (lambda x, keep: x.masked_fill(keep, -100.0), False),
        (lambda x, keep: torch.softmax(x.masked_fill(keep, float("-inf")), -1), False),
        (lambda x, keep: x.clamp(max=1e5), False),
    ],
)
def test_what_is_a_mask(function: Callable[[Tensor, Tensor], Tensor], is_mask: bool) -> None:
    gm = make_fx(function, decomposition_table=core_aten_decompositions(), tracing_mode="fake")(
        torch.ones(8, 8), torch.ones(8, 8, dtype=torch.bool)
    )
    mark_values(gm.graph)
    (result,) = gm.graph.output_node().all_input_nodes
    assert values.is_mask(result) == is_mask
    assert is_plain_float(result) != is_mask


class Norm(nn.Module):
    """(batch, 16) to (batch, 4): Llama's norm of small values, then a logarithm and a quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = 0.02 * self.first(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        small = self.gate(x).square() * 1e-4 + 1e-5
        return self.last(torch.log(small) / 8 + x / (1e4 * small))


@pytest.mark.filterwarnings(LEFT_ALONE)
@pytest.mark.parametrize("storage", STORAGES)
def test_divisors_do_not_become_zero(storage: str) -> None:
    backend = eager_backend(storage, recipe="fp8")
    compare(Norm, batches(8, 16), backend, tolerance=0.6)  # 0.51 in simulate; NaN where a divisor is 0
    assert not {"mean", "add", "add_1"} & {s.tensor for s in backend.plans[0].sites if s.kind == "output"}


def with_loss() -> nn.Module:
    """(batch, 16) and (batch,) labels to a loss, with nothing but the loss to store."""
    return Parts(lambda m, x, y: F.cross_entropy(m.scale * x, y), scale=nn.Parameter(torch.tensor(3.0)))


@pytest.mark.parametrize("storage", ["native", "packed"])
def test_what_backward_exponentiates_is_not_stored_in_8_bits(storage: str) -> None:
    labels = torch.arange(64) % 16
    backend = eager_backend(storage, recipe="fp8", low_ratio=1.0)
    compare(with_loss, [(x, labels) for (x,) in batches(64, 16)], backend, tolerance=0.1)
    assert "sub_1" not in {s.tensor for s in backend.plans[0].sites}  # log-softmax, decomposed
