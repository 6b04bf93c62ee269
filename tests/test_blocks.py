"""Block formats beside the slow reference, ml_dtypes, gfloat and closed forms: bits, shapes, specials, errors."""

from __future__ import annotations

import math

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from block_reference import reference_encode_blocks, reference_tensor_scale
from block_samples import FORMATS, KINDS, ids, numbers
from gfloat import formats as gf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

import fxprec
from fxprec import cli
from fxprec.errors import FormatError
from fxprec.numerics import block_codec, blocks
from fxprec.numerics.blocks import BlockFormat, find_blocks
from fxprec.numerics.formats import E4M3FN, E4M3FN_NAN, Format


def check(x: Tensor, fmt: BlockFormat, seed: int | None) -> None:
    """Assert the reference's bytes and numbers."""
    whole = block_codec.tensor_scale(x, fmt) if fmt.tensor_scale else None
    wanted_whole = reference_tensor_scale(x.tolist(), fmt) if fmt.tensor_scale else 1.0
    np.testing.assert_equal(1.0 if whole is None else whole.item(), wanted_whole)
    found = block_codec.encode(x, fmt, whole, None if seed is None else torch.tensor([seed], dtype=torch.int32))
    wanted = reference_encode_blocks(x.tolist(), fmt, wanted_whole, seed)
    assert found.codes.numel() == len(wanted.codes) * fmt.code_bytes
    known = torch.tensor([not math.isnan(s) for s in wanted.scales], dtype=torch.bool)
    in_bytes = torch.tensor(list(wanted.bytes(fmt)), dtype=torch.uint8)
    both = (part.reshape(-1, fmt.code_bytes)[known] for part in (found.codes, in_bytes)) if len(x) else ()
    assert len({tuple(part.flatten().tolist()) for part in both}) <= 1
    decoded = block_codec.decode(found, fmt, len(x), whole)
    np.testing.assert_array_equal(decoded.numpy(), np.array(wanted.values(fmt, len(x), wanted_whole), np.float32))


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_gives_the_references_bits(fmt: BlockFormat, kind: str) -> None:
    for count, seed in ((3 * fmt.block, None), (fmt.block + 5, -77777777), (1, 3), (0, None)):
        check(numbers(kind, count), fmt, seed)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["nearest", "stochastic"]),
    st.sampled_from(KINDS),
    st.booleans(),
)
def test_shapes_strides_and_dtypes(
    fmt: BlockFormat, shape: list[int], dtype: torch.dtype, rounding: str, kind: str, is_turned: bool
) -> None:
    x = numbers(kind, math.prod(shape)).view(shape).to(dtype)
    order = list(reversed(range(x.dim())))
    turned = x.permute(order).contiguous().permute(order) if is_turned else x
    found = fxprec.encode(turned, fmt, rounding, torch.Generator().manual_seed(1))
    same = fxprec.encode(x.float().flatten(), fmt.name, rounding, torch.Generator().manual_seed(1))
    assert torch.equal(found.codes, same.codes)
    assert found.nbytes == fmt.num_bytes(x.numel())
    decoded = fxprec.decode(found, fmt)
    assert decoded.shape == x.shape
    assert decoded.dtype == torch.float32
    rounded = fxprec.quantize(turned, fmt, rounding, torch.Generator().manual_seed(1))
    assert rounded.dtype == dtype
    assert rounded.shape == x.shape
    torch.testing.assert_close(rounded, decoded.to(dtype), rtol=0, atol=0, equal_nan=True)


ML_ELEMENTS = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("name", ML_ELEMENTS)
def test_mx_is_what_ml_dtypes_and_gfloat_say(name: str) -> None:
    fmt = blocks.NAMED[name]
    info = getattr(gf, f"format_info_{name}" if "_" in name else f"format_info_{name}_e2m1")
    x = torch.cat([numbers("normal", 512), numbers("wide", 512).clamp(-1e30, 1e30), numbers("zero", 32)])
    found = fxprec.encode(x, name)
    codes = block_codec.unpacked(found.codes.view(-1, fmt.code_bytes), fmt.bits).to(torch.uint8).numpy()
    scales = found.scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    values = codes.view(ML_ELEMENTS[name]).astype(np.float64) * scales[:, None]
    np.testing.assert_array_equal(fxprec.decode(found, name).double().numpy(), values.flatten())
    theirs = [
        gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in x.double().numpy().reshape(-1, 32)
    ]
    np.testing.assert_array_equal(values, np.stack(theirs))


def test_every_scale_and_code_of_mxfp4_decodes_as_ml_dtypes_say() -> None:
    scales = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.int32).repeat(256, 2)
    packed = block_codec.packed(codes, 4).view(-1)
    encoded = fxprec.BlockCodes(packed, scales.view(torch.float8_e8m0fnu), None, None, torch.Size((256, 32)))
    elements = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[:, None] * np.tile(elements, 2)
    np.testing.assert_array_equal(fxprec.decode(encoded, "mxfp4").numpy(), wanted)


def test_closed_forms() -> None:
    x = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -6, 5, 2.5, 7, 0.25, 0.75, 7.99]).repeat(2)
    wanted = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -6, 4, 2, 6, 0, 1, 6]
    assert fxprec.quantize(x, "mxfp4").tolist() == wanted * 2
    # 6 of e2m1 times 448 of e4m3fn times the tensor's scale is the largest magnitude.
    y = torch.linspace(-3, 3, 16)
    assert fxprec.quantize(y, "nvfp4").abs().max() == 3
    assert fxprec.encode(y, "nvfp4").scales.float().item() == 448
    z = torch.arange(256.0)
    assert torch.equal(fxprec.quantize(z, "int8"), z)
    assert fxprec.encode(z, "int8").scales.float().item() == 1
    assert fxprec.quantize(torch.arange(16.0) / 4 - 2, "int4").tolist() == (torch.arange(16.0) / 4 - 2).tolist()
    assert fxprec.encode(torch.tensor([0.0, 1, 2, 3]), "int2").codes[0].item() == 0b11100100
    assert (fxprec.encode(torch.zeros(1000), "int4").nbytes, blocks.INT4.num_bytes(1000)) == (4 * 132, 528)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_stochastic_rounding_has_no_bias_and_saturates_nothing(fmt: BlockFormat) -> None:
    """The mean of 4,000 draws is within 5 standard errors of the number; the largest of a block is kept in range."""
    x = numbers("normal", fmt.block).repeat(4000)
    generator = torch.Generator().manual_seed(0)
    rounded = fxprec.quantize(x, fmt, "stochastic", generator).view(4000, -1).double()
    error = rounded.mean(0) - x.view(4000, -1)[0]
    deviation = rounded.std(0) / 4000**0.5
    assert (error.abs() <= 5 * deviation + 1e-6).all()


def test_specials_spoil_their_block_and_no_other() -> None:
    for fmt in FORMATS:
        for special in (math.nan, math.inf, -math.inf):
            x = torch.ones(3 * fmt.block)
            x[fmt.block] = special
            found = fxprec.quantize(x, fmt).view(3, -1).isnan()
            assert found.all(1).tolist() == ([True] * 3 if fmt.tensor_scale else [False, True, False])


def test_the_derivative_is_1_and_out_receives() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    fxprec.quantize(x, "int4").sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(5, 7))
    out = torch.empty(5, 7)
    assert fxprec.quantize(x, "int4", out=out) is out
    assert torch.equal(out, fxprec.quantize(x.detach(), "int4"))


def test_names() -> None:
    for fmt in FORMATS:
        assert blocks.find(fmt.name) == fmt == blocks.find(fmt)
        assert blocks.find(str(fmt).upper()) == fmt
    assert blocks.find("mxfp8") is blocks.MXFP8_E4M3
    assert blocks.find("bf16").name == "bf16"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: blocks.find("mxfp44"), "did you mean 'mxfp4'"),
        (lambda: blocks.find("bf17"), "did you mean 'bf16'"),
        (lambda: find_blocks("bf16"), "'bf16' has no blocks; give a block format, such as 'mxfp4'"),
        (lambda: BlockFormat(Format(4, 3), 7, "e8m0"), "block=7 is not a size of a block; use a power of two"),
        (lambda: BlockFormat(Format(4, 3), 32, ["e8m0"]), "scale=['e8m0'] is unknown; use one of"),
        (lambda: blocks.find("int3/64:bf16"), "use 1, 2, 4 or 8"),
        (lambda: blocks.find("int4/48:bf16"), "power of two from 8 to 4096"),
        (lambda: blocks.find("int4/64:e8m0"), "use scale='bf16'"),
        (lambda: blocks.find("1-2-1/32:e9m0"), "use one of ['e8m0'"),
        (lambda: blocks.find("1-2-1/32:e8m0*"), "use it with e4m3fn"),
        (lambda: blocks.find("bf16/32:e8m0"), "4, 6 or 8 bits"),
        (lambda: BlockFormat(E4M3FN_NAN, 32, "e8m0"), "use overflow='saturate'"),
        (lambda: fxprec.quantize(torch.ones(3), "mxfp4", "zero"), "use 'nearest' or 'stochastic'"),
        (lambda: fxprec.quantize(torch.ones(3, dtype=torch.float64), "mxfp4"), "rounded twice"),
        (
            lambda: fxprec.decode(torch.ones(3), "mxfp4"),
            "codes of mxfp4 are a fxprec.BlockCodes, not Tensor; use encode's result",
        ),
        (lambda: fxprec.decode(fxprec.encode(torch.ones(3), "int4"), E4M3FN), "not BlockCodes"),
        (lambda: fxprec.decode(fxprec.encode(torch.ones(3), "mxfp4"), "int4"), "use encode's result"),
        (lambda: fxprec.decode(fxprec.encode(torch.ones(40), "mxfp8"), "mxfp4"), "codes of mxfp4, (40,)"),
    ],
)
def test_what_no_block_can_be_is_said_in_one_line(make, words: str) -> None:
    with pytest.raises(FormatError) as error:
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_lists_them() -> None:
    rows = {r[0]: r for line in CliRunner().invoke(cli.app, ["formats"]).output.splitlines() if (r := line.split())}
    assert rows["mxfp4"] == ["mxfp4", "MXFP4", "1-2-1", "32", "e8m0", "-", "-", "4.25"]
    assert blocks.NAMED.keys() <= rows.keys()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4"])
def test_10000_draws_of_a_gradient_have_no_bias(name: str) -> None:
    """Of each element, and of a product with the block: the sum in which a bias would add up."""
    fmt, draws = find_blocks(name), 10_000
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(fmt.block, generator=generator) * torch.exp2(torch.randn(fmt.block, generator=generator) * 2)
    other = torch.randn(fmt.block, generator=generator) + 1
    rows = x.expand(draws, fmt.block).contiguous()
    found = fxprec.quantize(rows, fmt, "stochastic", torch.Generator().manual_seed(1)).double()
    error = found - x.double()
    product = error @ other.double()
    assert abs(float(product.mean())) <= 3 * float(product.std()) / draws**0.5
    spread = error.std(0) / draws**0.5
    assert (error.mean(0).abs() <= 4 * spread + 1e-7).all(), "one of 16 or 32 elements is beyond 3 by chance"
    nearest = float(((fxprec.quantize(x, fmt).double() - x.double()) * other.double()).sum())
    assert abs(nearest) > 3 * float(product.std()) / draws**0.5, "rounding to nearest has a bias that this would see"
