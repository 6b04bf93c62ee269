"""Option ``accumulator``: whole training steps whose GEMMs add up in a format of their own."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend
from torch import Tensor, nn

import fxprec
from fxprec import Accumulator, ConfigError, FallbackError, FxprecWarning, arith
from fxprec.config import Settings
from fxprec.numerics.reference import reference_quantize
from fxprec.runtime.arith import convolution, gemm_ops  # noqa: F401  registers the ops


def test_a_step_of_an_mlp_is_matmul_by_matmul_what_arith_gives() -> None:
    """Recipe fp32 rounds nothing else, so every number must agree bit for bit."""
    model = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))
    x = torch.randn(8, 24, requires_grad=True)
    backend = eager_backend("fp32", accumulator=Accumulator(format="1-5-2", chunk=8))
    out = compiled(model, backend)(x)
    grad = torch.randn_like(out)
    out.backward(grad)

    def times(a: Tensor, b: Tensor) -> Tensor:
        return arith.matmul(a, b, "fp32", "1-5-2", chunk=8)

    first, last = model[0], model[2].weight
    with torch.no_grad():
        hidden = times(x, first.weight.T) + first.bias
        assert torch.equal(out, times(hidden.relu(), last.T))
        back = times(grad, last) * (hidden > 0)
        assert torch.equal(last.grad, times(grad.T, hidden.relu()))
        assert torch.equal(first.weight.grad, times(back.T, x))
        assert torch.equal(first.bias.grad, back.sum(0))
        assert torch.equal(x.grad, times(back, first.weight))
    assert backend.plans[0].notes == ("GEMMs add up in 1-5-2, in chunks of 8",)
    assert not torch.allclose(out, model(x), rtol=1e-2), "1-5-2 sums are far from float32's"


def wide(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@pytest.mark.parametrize(
    ("dims", "stride", "padding", "dilation", "groups", "transposed", "extra"),
    [
        (2, (1, 1), (0, 0), (1, 1), 1, False, (0, 0)),
        (2, (2, 3), (1, 2), (2, 1), 2, False, (0, 0)),
        (1, (2,), (1,), (1,), 4, False, (0,)),
        (3, (1, 2, 1), (1, 0, 1), (1, 1, 2), 1, False, (0, 0, 0)),
        (2, (2, 1), (3, 3), (1, 1), 1, False, (0, 0)),  # more padding than kernel
        (2, (3, 2), (0, 1), (2, 1), 2, True, (1, 1)),
    ],
)
def test_convolutions_as_matrix_products_are_pytorchs(dims, stride, padding, dilation, groups, transposed, extra):
    x = torch.randn(2, 4, *[9] * dims, dtype=torch.double, requires_grad=True)
    channels = (4, 6 // groups) if transposed else (8, 4 // groups)
    weight = torch.randn(*channels, *[3, 2, 2][:dims], dtype=torch.double, requires_grad=True)
    wanted = torch.convolution(x, weight, None, stride, padding, dilation, transposed, extra, groups)
    grad = torch.randn_like(wanted)
    of_x, of_weight = torch.autograd.grad(wanted, (x, weight), grad)
    window = convolution.Window(weight.shape[2:], stride, padding, dilation)
    with torch.no_grad():
        if transposed:
            out = convolution.correlate_transposed(x, weight, window, wanted.shape[2:], groups, wide)
            back = convolution.correlate(grad, weight, window, groups, wide)
            found = convolution.weight_gradient(grad, x, window, groups, wide)
        else:
            out = convolution.correlate(x, weight, window, groups, wide)
            back = convolution.correlate_transposed(grad, weight, window, x.shape[2:], groups, wide)
            found = convolution.weight_gradient(x, grad, window, groups, wide)
    for a, b in ((out, wanted), (back, of_x), (found, of_weight)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_convolutions_sums_are_rounded_after_every_product() -> None:
    """One output of each kind, added up by hand in exact fractions."""
    fmt = fxprec.numerics.formats.parse("1-4-3")
    model = nn.Conv2d(2, 3, 2, stride=2, bias=True)
    x = torch.randn(2, 2, 5, 4, requires_grad=True)
    backend = eager_backend("fp32", accumulator="1-4-3")
    out = compiled(model, backend)(x)
    grad = torch.randn_like(out)
    out.backward(grad)

    def add_up(pairs) -> float:
        total = 0.0
        for a, b in pairs:
            exact = Fraction(total) + Fraction(float(a * b))
            total = float(reference_quantize(torch.tensor(float(exact)), fmt))
        return total

    w, at = model.weight.detach(), x.detach()
    forward = add_up((at[1, c, 2 + i, j], w[2, c, i, j]) for c in range(2) for i in range(2) for j in range(2))
    assert out[1, 2, 1, 0].item() == (torch.tensor(forward) + model.bias[2]).item()
    everywhere = [(n, i, j) for n in range(2) for i in range(2) for j in range(2)]
    of_weight = add_up((grad[n, 1, i, j], at[n, 1, 2 * i + 1, 2 * j]) for n, i, j in everywhere)
    assert model.weight.grad[1, 1, 1, 0].item() == of_weight
    assert x.grad[0, 1, 2, 1].item() == add_up((grad[0, o, 1, 0], w[o, 1, 0, 1]) for o in range(3))
    torch.testing.assert_close(model.bias.grad, grad.sum((0, 2, 3)))


class Mixed(nn.Module):
    """A channels-last convolution, a matrix-vector and a batched product, a strided reader."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, 2)
        self.vector = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(F.gelu(self.conv(x))).flatten(2)
        return (torch.bmm(h, h.transpose(1, 2)).sum((1, 2)) + (h[:, 0, :12] @ self.vector)).tanh()


@pytest.mark.parametrize("lowering", ["eager", pytest.param("auto", marks=pytest.mark.inductor)])
def test_a_wide_accumulator_changes_nothing_but_the_order(lowering: str) -> None:
    model = Mixed().to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    backend = fxprec.Backend(fxprec.Config(recipe="fp32", accumulator="fp32", lowering=lowering))
    compiled(model, backend)(x).sum().backward()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=2e-4, atol=1e-5)


def test_chunks_keep_long_sums_from_swamping() -> None:
    """Ones added to a 1-6-9 sum stop at 1024; in chunks of 64 they reach 4096 (Wang et al. 2018)."""
    model = nn.Linear(4096, 1, bias=False)
    nn.init.ones_(model.weight)
    x = torch.ones(1, 4096)

    def out(accumulator: object) -> float:
        torch._dynamo.reset()
        with torch.no_grad():
            return compiled(model, eager_backend("fp32", accumulator=accumulator))(x).item()

    assert out("1-6-9") == 1024
    assert out(Accumulator(format="1-6-9", chunk=64)) == 4096
    assert out(Accumulator(format="1-6-9", kahan=True)) == 4096


def test_fused_attention_keeps_its_sums_and_says_so() -> None:
    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with pytest.warns(FxprecWarning, match=r"keeps its own accumulator, not 1-5-2; .*sdpa_kernel\(SDPBackend.MATH\)"):
        compiled(attend, eager_backend("bf16", accumulator="1-5-2"))(q)
    torch._dynamo.reset()
    with pytest.raises(FallbackError, match="keeps its own accumulator"):
        compiled(attend, eager_backend("bf16", accumulator="1-5-2", strict=True))(q)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"accumulator": "1-6-9", "storage": "packed"},
            "^accumulator simulates sums that no hardware computes, and storage='packed' runs GEMMs on the hardware's "
            "own accumulators; use storage='simulate' or leave accumulator out",
        ),
        (
            {"accumulator": "1-8-22"},
            "^accumulator is 1-8-22, which has one mantissa bit less than float32: sums are computed in float32 and "
            "would be rounded twice; use at most 21 mantissa bits",
        ),
        ({"accumulator": 16}, "accumulator is 16; give it a fxprec.Format, its name"),
        (
            {"accumulator": "1_6_9"},
            "^accumulator: unknown format '1_6_9'; did you mean|^accumulator: unknown format '1_6_9'; use one of",
        ),
    ],
)
def test_what_is_no_accumulator_is_refused(options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        fxprec.Config(recipe="hfp8", **options)


def test_chunk_and_products_are_checked_and_the_config_is_json() -> None:
    with pytest.raises(ConfigError, match=r"accumulator\.chunk is 0; give it an int of at least 1"):
        Accumulator(format="1-6-9", chunk=0)
    with pytest.raises(ConfigError, match=r"accumulator\.products"):
        Accumulator(format="1-6-9", products="1-8-22")
    config = fxprec.Config(recipe="bf16", accumulator="1-6-9")
    assert Settings.of(config).storage == "simulate"
    found = config.to_dict()["accumulator"]
    assert found == {"format": "1-6-9", "products": "fp32", "kahan": False, "chunk": None}
