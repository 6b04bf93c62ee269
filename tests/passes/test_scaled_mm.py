"""Products of operands in blocks as `F.scaled_mm` takes them: layouts, torch's own checks, and the decoded product's bits."""

from dataclasses import replace

import pytest
import torch
from coded_products import lower_as_on_sm_100, operands, recorded
from torch import nn

import fxprec
from fxprec import compat
from fxprec.compat import FakeTensorMode, copied, scaled_mm
from fxprec.errors import FallbackError, FxprecWarning
from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.kernels.scaled_mm import ScaledMm, scaling_of
from fxprec.numerics import block_codec
from fxprec.numerics.blocks import find_blocks
from fxprec.numerics.swizzle import BLOCKS, ROWS, places, swizzled
from fxprec.passes.lowering.block_operands import laid_out
from fxprec.passes.lowering.scaled_mm import multiply_blocks
from fxprec.runtime import scaled_mm as computed

aten = torch.ops.aten
SHAPES = [(128, 4), (1, 1), (127, 5), (300, 9), (256, 16)]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_scale_lies_where_tensor_cores_read_it(shape):
    scales = torch.randint(256, shape, dtype=torch.uint8)
    flat = swizzled(scales)
    assert flat.numel() == -(-shape[0] // ROWS) * ROWS * (-(-shape[1] // BLOCKS) * BLOCKS)
    assert torch.equal(flat[places(*shape)], scales)
    assert int(flat.count_nonzero()) == int(scales.count_nonzero())  # what is padded is 0


@pytest.mark.parametrize("shape", SHAPES)
def test_the_layout_is_torchaos(shape):
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    scales = torch.randint(256, shape, dtype=torch.uint8)
    assert torch.equal(swizzled(scales), to_blocked(scales))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 64, bias=False), nn.Tanh(), nn.Linear(64, 32))


RECIPES = {
    "mxfp8": "mxfp8",
    "in bf16": "mxfp8",
    "nvfp4": "nvfp4",
    "eden": operands(forward="nvfp4", input_grad="nvfp4", weight_grad="nvfp4", eden=32, square_weights=True),
    "one scale": operands(forward="1-2-1/16:e4m3fn", input_grad="1-2-1/16:e4m3fn"),
    "forward alone": operands(forward="mxfp8"),
}
TOKENS = {"in bf16": 96}  # from 2^20 products on, where the processor has them; NVFP4's numbers are rounded to it
PRODUCTS = {"mxfp8": 8, "in bf16": 8, "nvfp4": 8, "eden": 8, "one scale": 5, "forward alone": 3}


def product(a, b):
    """Multiply in float64: no layout of the operands changes a bit of what is rounded to float32."""
    return (a.double() @ b.double()).to(a.dtype)


def with_bias(bias, a, b):
    """Add a bias: in 16 bits before the one rounding, as GEMMs do."""
    fused = a.dtype != torch.float32
    return (a.double() @ b.double() + bias.double()).to(a.dtype) if fused else product(a, b) + bias


def in_float64(gm):
    """Return the graph with products that do not depend on the order of their sums."""
    exact = {aten.mm.default: product, aten.addmm.default: with_bias}
    for node in gm.graph.nodes:
        node.target = exact.get(node.target, node.target)
    gm.recompile()
    return gm


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_codes_have_the_bits_of_decoded_ones(recipe):
    count = 0
    for half in recorded(RECIPES[recipe], layers(), torch.randn(TOKENS.get(recipe, 32), 128)).values():
        gm = copied(half.gm)
        assert multiply_blocks(gm.graph) == ()
        gm.graph.lint()
        gm.recompile()
        count += len(ScaledMm.nodes(gm.graph))
        if recipe != "eden":
            assert not [n for n in Quantize.nodes(gm.graph) if n.args[2] < -1]
        assert not [n for n in Dequantize.nodes(gm.graph) if n.args[0] in Quantize.nodes(gm.graph) and n.args[2] == -1]
        with torch.no_grad():
            torch.manual_seed(3)
            wanted = in_float64(copied(half.gm))(*half.args)
            torch.manual_seed(3)
            found = in_float64(gm)(*half.args)
        for a, b in zip(wanted, found, strict=True):
            assert a is b is None or torch.equal(a, b)
    assert count == PRODUCTS[recipe]


def arguments(name, rows=96, summed=128, columns=48):
    """Return the arguments that a product of random matrices gets, and the decoded matrices."""
    fmt = find_blocks(name)
    made = []
    for outer in (rows, columns):
        x = torch.randn(outer, summed)
        whole = block_codec.tensor_scale(x, fmt) if fmt.tensor_scale else None
        encoded = block_codec.encode(x, fmt, whole)
        codes, scales = laid_out(encoded, name, (outer, summed))
        made.append((codes, scales, whole, block_codec.decode(encoded, fmt, x.numel(), whole).view(x.shape)))
    (a, scale_a, whole_a, read_a), (b, scale_b, whole_b, read_b) = made
    given = scaled_mm.Arguments.of(scaling_of(fmt), (a, b), (scale_a, scale_b), (whole_a, whole_b))
    return given, read_a, read_b


FORMATS = ["mxfp8", "e4m3fn/32:e8m0up", "nvfp4", "1-2-1/16:e4m3fn"]


@pytest.mark.parametrize("name", FORMATS)
def test_the_arguments_are_interpreted_as_the_numbers_that_were_encoded(name):
    given, a, b = arguments(name)
    bias = torch.randn(48)
    assert torch.equal(computed.interpreted(given, None, torch.float32), product(a, b.t()))
    assert torch.equal(
        computed.interpreted(given, bias, torch.bfloat16), (a.double() @ b.double().t() + bias).to(torch.bfloat16)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_torchs_own_checks_take_the_arguments(name):
    """Fake tensors on a GPU: torch checks shapes, strides, dtypes, recipes and swizzles of each call."""
    given, _, _ = arguments(name)
    y = on_gpu(given).multiply(None, torch.bfloat16)
    assert (y.shape, y.dtype, y.device.type) == ((96, 48), torch.bfloat16, "cuda")


@pytest.mark.skipif(compat.torch_version() >= (2, 14), reason="torch 2.14 takes wrong sizes of fake tensors too")
@pytest.mark.parametrize("name", FORMATS)
def test_torchs_own_checks_refuse_short_scales_and_a_row_major_operand(name):
    given, _, _ = arguments(name)
    short = [given.scale_a[0][:-1], *given.scale_a[1:]]
    with pytest.raises(RuntimeError, match="scale_a must have"):
        on_gpu(replace(given, scale_a=short)).multiply(None, torch.bfloat16)
    row_major = torch.empty(given.mat_b.shape, dtype=torch.uint8).view(given.mat_b.dtype)
    with pytest.raises(RuntimeError, match="mat2 must be col_major"):
        on_gpu(replace(given, mat_b=row_major)).multiply(None, torch.bfloat16)


def on_gpu(given):
    """Return the arguments as fake tensors of a GPU."""
    with FakeTensorMode():

        def fake(x):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

        scales = [[fake(scale) for scale in x] for x in (given.scale_a, given.scale_b)]
        return scaled_mm.Arguments(fake(given.mat_a), fake(given.mat_b), *scales, given.recipe, given.swizzle)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_codes_and_scales_are_torchaos(name):
    """torchao's own tensors hold the bytes that `F.scaled_mm` is given."""
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    fmt = find_blocks(name)
    if name == "mxfp8":
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        scale, codes = mx.to_mx(x, torch.float8_e4m3fn, 32)
        whole = None
    else:
        nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
        whole = block_codec.tensor_scale(x, fmt)
        scale, codes = nv.nvfp4_quantize(x, per_tensor_scale=whole[0])
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    own, swizzles = laid_out(block_codec.encode(x, fmt, whole), name, (64, 128))
    assert torch.equal(own, codes.view(torch.uint8).view(own.shape))
    assert torch.equal(swizzles, to_blocked(scale.view(torch.uint8).view(64, -1)))


REFUSED = [
    (nn.Linear(128, 40), "mxfp8", torch.randn(96, 128), "40 columns do not fit"),
    (nn.Linear(128, 64), operands(forward="mxfp8_e5m2"), torch.randn(96, 128), "and not mxfp8_e5m2"),
]


@pytest.mark.parametrize(("model", "recipe", "x", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_stays_decoded_is_named_with_its_reason(model, recipe, x, why):
    half = recorded(recipe, nn.Sequential(nn.Tanh(), model), x)["forward"]
    gm = copied(half.gm)
    ((place, reason),) = multiply_blocks(gm.graph)
    assert why in reason
    assert "(1" in place
    assert not ScaledMm.nodes(gm.graph)


def trained(model, x, **options):
    torch.compiler.reset()
    call = torch.compile(model, backend=(backend := fxprec.Backend(fxprec.Config(**options))))
    loss = call(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], backend


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_step_multiplies_codes(monkeypatch, recipe):
    lower_as_on_sm_100(monkeypatch)
    x, seen = torch.randn(32, 128), []
    interpreted = computed.interpreted
    monkeypatch.setattr(computed, "interpreted", lambda *args: seen.append(args[0].recipe) or interpreted(*args))
    options = {"policy": "random", "seed": 1}  # another key than the cache has
    loss, gradients, backend = trained(layers(), x, recipe=recipe, **options)
    assert len(seen) == 8
    assert [e for e in backend.events if e.kind == "fallback"] == []
    decoded, others, _ = trained(layers(), x, recipe=recipe, lowering="eager")
    torch.testing.assert_close(loss, decoded, rtol=0.02, atol=0)
    for a, b in zip(gradients, others, strict=True):
        assert float((a - b).norm() / b.norm()) < (0.02 if recipe == "mxfp8" else 0.6)  # nvfp4 rounds at random


def test_a_product_that_stays_decoded_is_a_warning_and_an_error_under_strict(monkeypatch):
    lower_as_on_sm_100(monkeypatch)
    model, x = nn.Sequential(nn.Tanh(), nn.Linear(128, 40)), torch.randn(96, 128)
    with pytest.warns(FxprecWarning, match=r"addmm \(1\): its operands in blocks are decoded .* 40 columns do not fit"):
        trained(model, x, recipe=RECIPES["forward alone"])
    with pytest.raises(FallbackError, match="40 columns do not fit"):
        trained(model, x, recipe=RECIPES["forward alone"], strict=True)
