"""Grouped products of operands in blocks as `F.scaled_grouped_mm` takes them: layouts, torch's checks, the decoded bits."""

from dataclasses import replace

import pytest
import torch
from coded_products import lower_as_on_sm_100, operands, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Parts
from torch import nn

import fxprec
from fxprec.compat import FakeTensorMode, copied, scaled_mm
from fxprec.errors import FallbackError
from fxprec.ir.grouped import GroupedMm, PaddedEnds
from fxprec.ir.symbolic import Dequantize, is_in_blocks
from fxprec.kernels.scaled_mm import ScaledGroupedMm, scaling_of
from fxprec.numerics import block_codec
from fxprec.numerics.blocks import find_blocks
from fxprec.numerics.swizzle import swizzled
from fxprec.passes.analysis import ops
from fxprec.passes.lowering.block_operands import laid_out
from fxprec.passes.lowering.scaled_mm import multiply_blocks
from fxprec.runtime import grouped_mm as by_group
from fxprec.runtime import scaled_mm as computed

ENDS = torch.tensor([30, 30, 101, 240], dtype=torch.int32)
"""Groups of odd sizes, one of them empty; 16 of 256 tokens belong to none."""


def bytes_of(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(0, 40), st.integers(1, 9))
def test_each_group_of_rows_has_the_tiles_of_a_matrix_of_its_own(sizes, beyond, blocks):
    scales = bytes_of(sum(sizes) + beyond, blocks)
    found = computed.swizzled_groups(scales, torch.tensor(sizes).cumsum(0), 0)
    wanted = torch.cat([swizzled(x) for x in scales[: sum(sizes)].split(sizes)])
    assert found.shape[1] % 4 == 0
    assert found.shape[0] % 128 == 0
    assert torch.equal(found.flatten()[: wanted.numel()], wanted)
    assert not found.flatten()[wanted.numel() :].any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(0, 5), st.integers(1, 300))
def test_each_group_of_blocks_has_the_tiles_of_a_matrix_of_its_own(sizes, beyond, rows):
    scales = bytes_of(rows, sum(sizes) + beyond)
    found = computed.swizzled_groups(scales, 32 * torch.tensor(sizes).cumsum(0), 32)
    wanted = torch.cat([swizzled(x) for x in scales[:, : sum(sizes)].split(sizes, dim=1)])
    assert found.shape[0] == -(-rows // 128) * 128
    assert found.shape[1] % 4 == 0
    assert torch.equal(found.flatten()[: wanted.numel()], wanted)
    assert not found.flatten()[wanted.numel() :].any()


def test_the_layouts_are_torchaos():
    quant = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8.quant")
    ends = torch.tensor([96, 96, 256, 352])
    scales = bytes_of(352, 8)
    wanted, rows = quant.torch_to_blocked_2d_M_groups(scales, ends)
    assert torch.equal(computed.swizzled_groups(scales, ends, 0)[: rows[-1]], wanted[: rows[-1]])
    scales = bytes_of(200, 11)
    wanted, columns = quant.torch_to_blocked_2d_K_groups(scales, ends // 32)
    held = int(columns[-1]) * 256
    assert torch.equal(computed.swizzled_groups(scales, ends, 32).flatten()[:held], wanted.flatten()[:held])
    scales = bytes_of(3, 200, 6)
    assert torch.equal(swizzled(scales), quant.torch_to_blocked_per_group_3d(scales))


class Experts(nn.Module):
    """Two grouped layers: the weights of one are read as they are, those of the other transposed."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 128, 192, dtype=dtype) / 11)
        self.down = nn.Parameter(torch.randn(4, 64, 192, dtype=dtype) / 14)

    def forward(self, x, ends):
        hidden = torch.ops.fxprec.grouped_mm(torch.tanh(x), self.up, ends)
        return torch.ops.fxprec.grouped_mm(nn.functional.gelu(hidden), self.down.mT, ends)


def batched():
    """A batch of three products with a parameter."""
    torch.manual_seed(0)
    return Parts(lambda m, x: torch.tanh(x) @ m.weight, weight=nn.Parameter(torch.randn(3, 128, 64) / 11))


def inputs():
    torch.manual_seed(1)
    return torch.randn(256, 128), ENDS


RECIPES = {
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "eden": operands(forward="nvfp4", input_grad="nvfp4", weight_grad="nvfp4", eden=32, square_weights=True),
    "forward alone": operands(forward="mxfp8"),
}
PRODUCTS = {"mxfp8": 5, "nvfp4": 5, "eden": 5, "forward alone": 2}  # x needs no gradient


def exact(a, b, offs):
    """Multiply numbers as they are decoded, in float64, and round once."""
    return by_group.grouped_mm(a.double(), b.double(), offs).to(torch.bfloat16)


def exact_batch(a, b):
    return (a.double() @ b.double()).to(torch.bfloat16)


def decoded(gm):
    """Return the graph with operands that are not rounded to bf16, and products that do not depend on an order of sums."""
    for node in gm.graph.nodes:
        if node.target is Dequantize.target and is_in_blocks(node):
            node.args = tuple(torch.float32 if arg is torch.bfloat16 else arg for arg in node.args)
    for product in [node for node in gm.graph.nodes if node.target in (GroupedMm.target, torch.ops.aten.bmm.default)]:
        behind = [product.args[0], product.args[1]]
        while behind:
            node = behind.pop()
            if node.target is ops.CONVERT:
                node.args = (node.args[0], torch.float32)
            if node.target is not Dequantize.target:
                behind += node.all_input_nodes
        product.target = exact if product.target is GroupedMm.target else exact_batch
    gm.recompile()
    return gm


def bits_of_codes(half, wanted):
    """Compare a half that multiplies codes with the half that decodes them; return the number of such products."""
    gm = copied(half.gm)
    assert multiply_blocks(gm.graph) == ()
    gm.graph.lint()
    gm.recompile()
    for product in ScaledGroupedMm.nodes(gm.graph):  # else Inductor expects these arguments, and fails
        assert "eager_input_vals" not in product.meta
    for padded in PaddedEnds.nodes(gm.graph):  # tensor cores read 16 bytes at once
        assert PaddedEnds.of(padded).unit * wanted.bits % 128 == 0
    with torch.no_grad():
        torch.manual_seed(3)
        expected = decoded(copied(half.gm))(*half.args)
        torch.manual_seed(3)
        found = decoded(gm)(*half.args)
    for a, b in zip(expected, found, strict=True):
        assert a is b is None or torch.equal(a, b)
    return len(ScaledGroupedMm.nodes(gm.graph))


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_codes_have_the_bits_of_decoded_ones(recipe):
    halves = recorded(RECIPES[recipe], Experts(), *inputs())
    fmt = find_blocks("mxfp8" if recipe in ("mxfp8", "forward alone") else "nvfp4")
    assert sum(bits_of_codes(half, fmt) for half in halves.values()) == PRODUCTS[recipe]


@pytest.mark.parametrize("rows", [96, 160])
@pytest.mark.parametrize("recipe", RECIPES)
def test_batches_of_products_are_groups_of_equal_size(recipe, rows):
    torch.manual_seed(1)
    halves = recorded(RECIPES[recipe], batched(), torch.randn(3, rows, 128, requires_grad=True))
    assert sum(bits_of_codes(half, find_blocks("mxfp8")) for half in halves.values()) == (
        1 if recipe == "forward alone" else 3
    )


def encoded(name, x):
    fmt = find_blocks(name)
    whole = block_codec.tensor_scale(x, fmt) if fmt.tensor_scale else None
    made = block_codec.encode(x, fmt, whole)
    codes, scales = laid_out(made, name, x.shape, is_swizzled=x.ndim == 3)
    return codes, scales, whole, block_codec.decode(made, fmt, x.numel(), whole).view(x.shape)


def arguments(name, is_sum):
    """Return the arguments of a grouped product of random numbers, and its decoded operands."""
    fmt, ends = find_blocks(name), torch.tensor([32, 32, 160, 224])
    a, scale_a, whole_a, read_a = encoded(name, torch.randn(80, 256) if is_sum else torch.randn(256, 128))
    b, scale_b, whole_b, read_b = encoded(name, torch.randn(48, 256) if is_sum else torch.randn(4, 48, 128))
    block = fmt.block if is_sum else 0
    scale_a = computed.swizzled_groups(scale_a, ends, block)
    scale_b = computed.swizzled_groups(scale_b, ends, block) if is_sum else scale_b
    given = scaled_mm.Arguments.of(scaling_of(fmt), (a, b), (scale_a, scale_b), (whole_a, whole_b), ends)
    return given, read_a, read_b.mT, ends


FORMATS = ["mxfp8", "e4m3fn/32:e8m0up", "nvfp4"]


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_the_arguments_are_interpreted_as_the_numbers_that_were_encoded(name, is_sum):
    given, a, b, ends = arguments(name, is_sum)
    assert torch.equal(computed.interpreted_groups(given), exact(a, b, ends))
    assert given.offs.dtype == torch.int32
    assert [tuple(scale.shape) for scale in given.scale_a[1:]] == ([(4,)] if name == "nvfp4" else [])


def on_gpu(given):
    """Return the arguments of `torch._scaled_grouped_mm` as fake tensors of a GPU."""
    tensors = given.mat_a, given.mat_b, given.scale_a[0], given.scale_b[0], given.offs
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in tensors]


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "e4m3fn/32:e8m0up"])
def test_torchs_own_checks_take_the_arguments(name, is_sum):
    """torch has checks without a GPU for the first form of the product only, which takes MXFP8."""
    given, *_ = arguments(name, is_sum)
    with FakeTensorMode():
        a, b, scale_a, scale_b, offs = on_gpu(given)
        y = torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs)
        assert (y.shape, y.dtype) == ((4, 80, 48) if is_sum else (256, 48), torch.bfloat16)
        with pytest.raises(RuntimeError, match="must be integer"):
            torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs.long())
        with pytest.raises(RuntimeError, match="column major"):
            torch._scaled_grouped_mm(a, torch.empty(b.shape, dtype=b.dtype, device="cuda"), scale_a, scale_b, offs=offs)


class Turned(nn.Module):
    """Each expert's matrix times its tokens, which are columns."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 128, dtype=torch.bfloat16))

    def forward(self, x, ends):
        return torch.ops.fxprec.grouped_mm(self.weight, torch.tanh(x).mT, ends)


REFUSED = [
    (Turned(), "mxfp8", "not each expert's matrix by tokens"),
    (Experts(), operands(forward="1-2-1/16:e4m3fn"), "and not 1-2-1/16:e4m3fn"),
    (Experts(), operands(forward="mxfp8_e5m2"), "and not mxfp8_e5m2"),
]


@pytest.mark.parametrize(("model", "recipe", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_stays_decoded_is_named_with_its_reason(model, recipe, why):
    x, ends = inputs()
    x = x.bfloat16() if isinstance(model, Turned) else x
    half = recorded(recipe, model, x, ends)["forward"]
    gm = copied(half.gm)
    (place, reason), *_ = multiply_blocks(gm.graph)
    assert why in reason
    assert "grouped_mm" in place
    assert not ScaledGroupedMm.nodes(gm.graph)


def trained(model, **options):
    torch.compiler.reset()
    call = torch.compile(model, backend=(backend := fxprec.Backend(fxprec.Config(**options))))
    loss = call(*inputs()).float().square().mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], backend


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_step_multiplies_codes(monkeypatch, recipe):
    lower_as_on_sm_100(monkeypatch)
    seen = []
    interpreted = computed.interpreted_groups
    monkeypatch.setattr(computed, "interpreted_groups", lambda given: seen.append(given.recipe) or interpreted(given))
    options = {"policy": "random", "seed": 1, "strict": True}  # another key than the cache has
    loss, gradients, backend = trained(Experts(), recipe=recipe, **options)
    assert len(seen) == 5
    assert [e for e in backend.events if e.kind == "fallback"] == []
    wanted, others, _ = trained(Experts(), recipe=recipe, lowering="eager")
    torch.testing.assert_close(loss, wanted, rtol=0.02, atol=0)
    for a, b in zip(gradients, others, strict=True):
        assert float((a - b).norm() / b.norm()) < (0.02 if recipe == "mxfp8" else 0.6)  # nvfp4 rounds at random


def test_a_float32_product_stays_decoded_and_is_an_error_under_strict(monkeypatch):
    lower_as_on_sm_100(monkeypatch)
    recipe = replace(operands(forward="mxfp8"), hi="fp32")
    with pytest.raises(FallbackError, match=r"grouped products of codes are bfloat16, and this one is torch\.float32"):
        trained(Experts(), recipe=recipe, strict=True)
