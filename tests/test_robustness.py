"""What models do: right results against uncompiled float32 and right plans, in every storage.

The formats keep 18 mantissa bits, so every value passes through quantize and dequantize and still has to agree
closely.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import STORED, Cnn, assert_close, compare, eager_backend, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxprec

EVERY_STORAGE = pytest.mark.parametrize("storage", STORED)
# Where the model's shape is the point and not what is stored of it: other tests simulate each of its operators.
PACKED = pytest.mark.parametrize("storage", ["packed", pytest.param("simulate", marks=pytest.mark.full)])


class Branches(nn.Module):
    """Runs ``body(self, *inputs)`` around one or two linear layers of width 16."""

    def __init__(self, body) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(16, 16), nn.Linear(16, 16), body
        self.register_buffer("count", torch.zeros(16))

    def forward(self, *inputs):
        return self.body(self, *inputs)


def x8() -> Tensor:
    return torch.randn(8, 16)


@EVERY_STORAGE
@pytest.mark.parametrize("mark", [True, False])
def test_one_plan_serves_dynamic_batches(storage: str, mark: bool) -> None:
    backend = eager_backend(storage)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        return model(x)

    compare(mlp, [(torch.randn(n, 16),) for n in (8, 12, 3, 20)], backend, call=call)
    assert len(backend.plans) == (1 if mark else 2)  # Dynamo's own: static first, dynamic from the second size on
    assert backend.plans[-1].sites[0].shape != backend.plans[0].sites[0].shape or mark


@EVERY_STORAGE
def test_an_identity_matrix_is_counted_in_16_bits(storage: str) -> None:
    """torch decomposes it to a range in uint16, and `torch.arange` has none: it ran in compiled code alone."""
    compare(lambda: Branches(lambda m, x: m.a(x) @ torch.eye(300)[:16, :16]), [(x8(),)], eager_backend(storage))


@EVERY_STORAGE
def test_batch_norm_buffers_and_in_place_relu(storage: str) -> None:
    compare(Cnn, [(torch.randn(4, 3, 8, 8),) for _ in range(2)], eager_backend(storage), fullgraph=True)


@PACKED
def test_dynamic_convolutions(storage: str) -> None:
    backend = eager_backend(storage)
    compare(Cnn, [(torch.randn(n, 3, 8, 8),) for n in (4, 6, 3)], backend, dynamic=True)
    assert len(backend.plans) == 1


@PACKED
def test_channels_last(storage: str) -> None:
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    compare(lambda: Cnn().to(memory_format=torch.channels_last), [(x,)], eager_backend(storage))


@PACKED
def test_a_graph_break_makes_two_plans(storage: str) -> None:
    def body(m, x):
        x = F.relu(m.a(x))
        torch._dynamo.graph_break()
        return m.b(x)

    backend = eager_backend(storage)
    compare(lambda: Branches(body), [(x8(),), (x8(),)], backend)
    assert [[g.module for g in plan.gemms] for plan in backend.plans] == [["a"], ["b"]]


@PACKED
def test_accumulation_over_backward_calls_and_two_forwards(storage: str) -> None:
    compare(mlp, [(x8(),) for _ in range(3)], eager_backend(storage), call=lambda m, x: m(x) + m(2 * x))


@PACKED
def test_retained_graph_gives_the_gradient_twice(storage: str) -> None:
    reference = mlp()
    own = copy.deepcopy(reference)
    x = x8()
    for model in (torch.compile(own, backend=eager_backend(storage)), reference):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for a, b in zip(own.parameters(), reference.parameters(), strict=True):
        assert_close(a.grad, b.grad, "gradient")


@PACKED
def test_tied_weights_are_one_parameter(storage: str) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 20, bias=False))
        model[3].weight = model[0].weight
        return model

    backend = eager_backend(storage)
    compare(make, [(torch.randint(0, 20, (4, 6)),)], backend)
    params = [site.tensor for site in backend.plans[0].sites if site.kind == "param"]
    assert len(params) == len(set(params))
    counted = sum(group.elements_by_kind.param for group in backend.plans[0].groups)
    assert counted == 20 * 16 + 16 * 16 + 16  # the shared table once


@EVERY_STORAGE
def test_in_place_operations(storage: str) -> None:
    def body(m, x):
        y = m.a(x)
        y.add_(1.0)
        y[:, 0] = 0
        m.count.add_(y.detach().mean(0))
        return y.relu_() * 2

    compare(lambda: Branches(body), [(x8(),), (x8(),)], eager_backend(storage))


@EVERY_STORAGE
def test_a_mutated_input(storage: str) -> None:
    compare(lambda: Branches(lambda m, x: m.a(x.mul_(2.0))), [(x8(),)], eager_backend(storage))


@EVERY_STORAGE
def test_views_duplicates_and_inputs_as_outputs(storage: str) -> None:
    def body(m, x):
        y = m.a(x)
        return y.view(-1, 4), y[:, :2], y.t(), x[1:], y, y, x, m.a.weight

    compare(lambda: Branches(body), [(x8(),)], eager_backend(storage), input_gradients=True)


@PACKED
def test_aliased_inputs(storage: str) -> None:
    model = lambda: Branches(lambda m, x, y: m.a(x) @ m.b(y).t())  # noqa: E731
    compare(model, [(x8(),)], eager_backend(storage), call=lambda m, x: m(x, x) + m(x, x[:]), input_gradients=True)


@EVERY_STORAGE
def test_an_input_that_aliases_a_mutated_one(storage: str) -> None:
    def body(m, x, y):
        x.add_(1.0)
        return m.a(x) * y

    compare(lambda: Branches(body), [(x8(),)], eager_backend(storage), call=lambda m, x: m(x.view(8, 16), x))


@PACKED
def test_outputs_that_are_no_tensors_or_need_no_gradient(storage: str) -> None:
    def body(m, x, k):
        y = m.a(x)
        return {"y": y, "k": k, "none": None, "best": y.argmax(1), "shape": y.shape, "positive": y > 0, "z": x * 3}

    compare(lambda: Branches(body), [(x8(), 3)], eager_backend(storage))


@PACKED
def test_two_backends_in_one_process(storage: str) -> None:
    fine, coarse = eager_backend(storage), eager_backend(storage, recipe="hfp8", low_ratio=1.0)
    torch.manual_seed(5)
    compare(mlp, [(x8(),)], fine)
    compare(mlp, [(x8(),)], coarse, tolerance=0.3)
    assert fine.plans[0].achieved_low_ratio < coarse.plans[0].achieved_low_ratio == 1.0
    assert {site.format for site in fine.plans[0].sites}.isdisjoint(site.format for site in coarse.plans[0].sites)


@PACKED
def test_a_model_with_no_gemm_is_one_group(storage: str) -> None:
    backend = eager_backend(storage)
    compare(lambda: Branches(lambda m, x: (x * m.a.bias).relu().sum(1)), [(x8(),)], backend)
    assert len(backend.plans[0].groups) == 1
    assert backend.plans[0].gemms == ()


@EVERY_STORAGE
@pytest.mark.parametrize(
    "function", [lambda x: x, lambda x: x + 1, lambda x: x.sum().item() + 1], ids=["identity", "add", "item"]
)
def test_graphs_without_anything_to_plan(storage: str, function) -> None:
    backend = eager_backend(storage)
    for x in (torch.arange(3), torch.arange(4)):
        found = torch.compile(function, backend=backend)(x)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(function(x)))
    assert backend.plans == ()


@PACKED
def test_frozen_parameters(storage: str) -> None:
    def some() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        model[2].bias.requires_grad_(False)
        return model

    compare(some, [(x8(),)], eager_backend(storage))
    compare(lambda: mlp().requires_grad_(False), [(x8(),)], eager_backend(storage), input_gradients=True)


@EVERY_STORAGE
def test_activation_checkpointing_inside_the_model(storage: str) -> None:
    def body(m, x):
        return m.b(checkpoint(lambda y: F.gelu(m.a(y)), x, use_reentrant=False))

    compare(lambda: Branches(body), [(x8(),)], eager_backend(storage))


@PACKED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_16_bit_parameters(storage: str, dtype: torch.dtype) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x)

    compare(mlp, [(x8(),)], eager_backend(storage), call=call, tolerance=2e-2)
    compare(lambda: mlp().to(dtype), [(x8().to(dtype),)], eager_backend(storage), tolerance=2e-2)


@EVERY_STORAGE
def test_empty_tensors(storage: str) -> None:
    compare(mlp, [(torch.randn(n, 16),) for n in (8, 0, 4)], eager_backend(storage))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 8)
        for t in range(3):
            h, c = self.cell(x[:, t], (h, c))
        return h


@PACKED
def test_recurrence_and_attention(storage: str) -> None:
    compare(Recurrent, [(torch.randn(2, 3, 8),)], eager_backend(storage))
    encoder = lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)  # noqa: E731
    compare(encoder, [(torch.randn(2, 5, 16),)], eager_backend(storage))


@PACKED
def test_attention_that_returns_its_weights(storage: str) -> None:
    attention = lambda: nn.MultiheadAttention(16, 4, batch_first=True)  # noqa: E731
    compare(attention, [(torch.randn(2, 5, 16),)], eager_backend(storage), call=lambda m, x: m(x, x, x))


@PACKED
def test_convolutions_of_other_kinds(storage: str) -> None:
    model = lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 2, 3, groups=2))  # noqa: E731
    compare(model, [(torch.randn(2, 3, 5, 5),)], eager_backend(storage), input_gradients=True)


@PACKED
def test_batched_matrix_products(storage: str) -> None:
    def body(m, x):
        w = m.a.weight[:12].reshape(3, 4, 16)
        y = torch.baddbmm(torch.bmm(w, x), w, x)
        return torch.einsum("bij,bkj->bik", y, y).sum((1, 2)), x.reshape(-1, 16) @ m.b.weight @ m.b.bias

    compare(lambda: Branches(body), [(torch.randn(3, 16, 6),)], eager_backend(storage), input_gradients=True)


@PACKED
def test_autograd_grad_instead_of_backward(storage: str) -> None:
    model, x = mlp(), x8()
    compiled = torch.compile(model, backend=eager_backend(storage))
    parameters = list(model.parameters())
    found = torch.autograd.grad(compiled(x).square().sum(), parameters)
    wanted = torch.autograd.grad(model(x).square().sum(), parameters)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, "gradient")


@PACKED
def test_double_backward_is_refused_in_words(storage: str) -> None:
    x = x8().requires_grad_()
    compiled = torch.compile(mlp(), backend=eager_backend(storage))
    loss = compiled(x).square().sum()
    with pytest.raises(
        fxprec.DoubleBackwardError, match="compiled graphs have no second derivatives; leave create_graph"
    ):
        torch.autograd.grad(loss, x, create_graph=True)


@PACKED
def test_skipped_backward_leaves_nothing_behind(storage: str) -> None:
    backend = eager_backend(storage)
    compiled = torch.compile(mlp(), backend=backend)
    for _ in range(20):
        compiled(x8())
    assert len(backend._graphs[0].controller.queue) <= 1


@EVERY_STORAGE
def test_a_complex_value_is_reported_and_left_as_it_is(storage: str) -> None:
    def body(m, x):
        return torch.fft.fft(m.a(x)).abs()

    model = Branches(body)
    compiled = torch.compile(model, backend=eager_backend(storage))
    x = x8()
    with pytest.warns(fxprec.FxprecWarning, match=r"complex64: complex values are not planned"):
        assert_close(compiled(x), model(x), "output")


def test_a_graph_without_inputs_needs_no_compiler_in_the_reference_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Tensor:
        return torch.arange(6.0).view(2, 3).cos() + torch.randn(2, 3)

    def refuses(*_: object) -> None:
        raise AssertionError("Inductor generates code")

    torch.manual_seed(0)
    expected = made()
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.codegen", refuses)
    torch.manual_seed(0)
    with torch._inductor.config.patch(fallback_random=True):
        found = torch.compile(made, backend=eager_backend("packed"))()
    assert_close(found, expected, "output")


@EVERY_STORAGE
def test_backward_reads_a_dynamic_size_and_no_copy(storage: str) -> None:
    """A copy of the bias was made for its size, and the pass that chooses copies failed."""

    def transposed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.aten.convolution(x, weight, bias, [1], [0], [1], True, [0], 3)

    given = [torch.randn(*shape)[..., ::2].requires_grad_() for shape in ((2, 6, 14), (6, 4, 6), (24,))]
    backend = eager_backend(storage, low_ratio=1.0)
    torch.compile(transposed, backend=backend, dynamic=True)(*given).square().sum().backward()
    found = [t.grad for t in given]
    exact = [t.detach().clone().requires_grad_() for t in given]
    transposed(*exact).square().sum().backward()
    for mine, other in zip(found, exact, strict=True):
        assert_close(mine, other.grad, "gradient")
