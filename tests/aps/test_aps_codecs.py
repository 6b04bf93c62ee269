"""Dettmers' 8-bit types: their tables, true nearest encoding, its errors; Triton against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from aps_reference import nearest_in_table
from interpreted import interpreted

from fxprec.errors import FormatError
from fxprec.runtime.aps import codecs
from fxprec.runtime.aps.codecs import codec

NAMES = ("dynamic-tree", "dynamic-uniform", "static-tree", "mantissa", "linear")
# Mean relative error in percent that true nearest gives (docs/algorithms.md, "8-bit data types"): U(0,1), N(0,1).
ERRORS = {
    "dynamic-tree": (0.94, 1.66),
    "linear": (1.50, 5.19),
    "mantissa": (4.97, 4.97),
    "static-tree": (3.26, 4.42),
}


@pytest.mark.parametrize("name", NAMES)
def test_encoding_is_the_true_nearest_entry(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    table = torch.tensor(codec(name).magnitudes)
    ties = ((table[1:].double() + table[:-1].double()) / 2).float()
    beside = [torch.nextafter(ties, torch.tensor(b)) for b in (0.0, 2.0)]
    random = torch.rand(20_000, generator=g) * 10 ** (-7 * torch.rand(20_000, generator=g))
    x = torch.cat([table, ties, *beside, random, torch.tensor([0.0, 1.5, 1e-30, 1e-45])])
    x = torch.cat([x, -x])
    found = codecs.decode_values(codecs.encode_values(x, codec(name)), codec(name))
    np.testing.assert_array_equal(found.numpy(), nearest_in_table(x.numpy(), name))


@pytest.mark.parametrize("name", NAMES)
def test_values_of_the_table_keep_their_value(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codecs.decode_values(codes, codec(name))
    assert torch.equal(codecs.decode_values(codecs.encode_values(values, codec(name)), codec(name)), values)


def test_the_papers_examples() -> None:
    c = codec("dynamic-tree")
    found = codecs.decode_values(codecs.encode_values(torch.tensor([0.2345678, 0.0000234]), c), c)
    assert found.tolist() == pytest.approx([0.23671875, 0.00001875], rel=1e-6)


@pytest.mark.parametrize("name", list(ERRORS))
def test_mean_relative_errors_reach_those_of_true_nearest(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    uniform = torch.rand(2_000_000, generator=g)
    # 5.6 standard deviations is the expected maximum of the 25 million numbers the figures were taken from.
    normal = torch.cat([torch.randn(2_000_000, generator=g), torch.tensor([5.6])])
    for x, wanted in zip((uniform, normal), ERRORS[name], strict=True):
        y = codecs.decode(*codecs.encode(x, codec(name)), codec(name))
        assert float(((y - x) / x)[x != 0].abs().mean() * 100) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_zero_stays_zero_where_the_table_has_one(name: str) -> None:
    c = codec(name)
    found = codecs.decode(*codecs.encode(torch.zeros(5), c), c)
    assert bool((found == 0).all()) == (c.magnitudes[0] == 0.0) == (name != "static-tree")
    assert codecs.encode(torch.empty(0), c)[0].shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_with_a_non_finite_number_decodes_to_nan_and_not_to_a_number(name: str) -> None:
    c = codec(name)
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert bool(codecs.decode(*codecs.encode(torch.tensor([1.0, bad, 0.0]), c), c).isnan().all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("power", [-149, -140, -126, 100, 127])
def test_tiny_and_huge_tensors_keep_their_size(name: str, power: int) -> None:
    c, x = codec(name), torch.tensor([1.0, -0.75]) * 2.0**power
    found = codecs.decode(*codecs.encode(x, c), c)
    assert bool(found.isfinite().all())
    if power >= -126:
        assert bool(((found - x).abs() <= 0.13 * x.abs()).all())


def test_stochastic_codes_are_neighbours_with_the_right_mean() -> None:
    c, g = codec("linear"), torch.Generator().manual_seed(2)
    x = torch.full((200_000,), 0.3, dtype=torch.float32)
    y = codecs.decode_values(codecs.encode_values(x, c, torch.rand(x.shape, generator=g, dtype=x.dtype)), c)
    assert sorted({round(v * 127) for v in y.unique().tolist()}) == [38, 39]
    assert float(y.mean()) == pytest.approx(0.3, abs=5e-5)


def test_dynamic_uniform_holds_the_values_of_bitsandbytes_without_its_smallest() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    theirs = functional.create_dynamic_map().abs().unique()
    ours = torch.tensor(codec("dynamic-uniform").magnitudes)
    missing = [v for v in theirs.tolist() if not bool(torch.isclose(ours, torch.tensor(v), rtol=1e-5, atol=0).any())]
    assert len(missing) == 1
    assert missing[0] == pytest.approx(5.5e-7)


def test_an_unknown_codec_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(FormatError, match="did you mean 'dynamic-tree'"):
        codec("dynamic-tre")


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_the_triton_kernel_gives_the_same_codes(name: str) -> None:
    from fxprec.runtime.aps import codec_triton

    g = torch.Generator().manual_seed(3)
    c = codec(name)
    x = torch.cat(
        [torch.rand(999, generator=g) - 0.5, torch.tensor(c.magnitudes), codecs.thresholds(c, torch.device("cpu"))]
    )
    x = torch.cat([x, -x, torch.tensor([torch.nan, torch.inf, 0.0, -0.0])])
    assert torch.equal(codec_triton.encode_values(x, c), codecs.encode_values(x, c))


@pytest.mark.parametrize("arch", [80, 90, *(pytest.param(arch, marks=pytest.mark.full) for arch in (89, 100))])
def test_the_triton_kernel_compiles_for_every_architecture(arch: int) -> None:
    pytest.importorskip("triton")
    from fxprec.runtime.aps import codec_triton

    assert "ld.global" in codec_triton.compile_to_ptx(arch)
