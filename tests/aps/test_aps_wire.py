"""Wires against the plain reference: every format and codec, bounded and not, stochastic rounding, widths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fxprec.errors import ConfigError, FormatError
from fxprec.numerics import rounding
from fxprec.numerics.formats import parse
from fxprec.numerics.reference import reference_quantize
from fxprec.runtime.aps.exponents import NON_FINITE_LAYER, ZERO_LAYER, exponent_codes, factor_exponents
from fxprec.runtime.aps.layout import layout
from fxprec.runtime.aps.options import APSOptions
from fxprec.runtime.aps.segments import scale_by_powers
from fxprec.runtime.aps.wire import wire_of

FORMATS = (
    "e5m2",
    "e5m2_sat",
    "e4m3fn",
    "1-5-2",
    "1-5-2-3",
    "1-4-3",
    "1-4-3+4",
    "1-3-0",
    "1-2-1",
    "1-6-9",
    "bf16",
    "fp16",
)


def probes(top: int) -> torch.Tensor:
    """Values of up to 2^top, many of them next to ties and in the subnormals."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, generator=g) * torch.exp2(torch.randint(-45, 1, (40_000,), generator=g))
    coarse = (torch.randint(1, 1 << 12, (40_000,), generator=g) / 1024) * torch.exp2(
        torch.randint(-40, 0, (40_000,), generator=g).float()
    )
    x = torch.cat([x, coarse, torch.nextafter(coarse, torch.tensor(0.0)), torch.tensor([0.0, -0.0, 1.0])])
    return (x / x.abs().max()) * 2.0**top


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_stand_for_the_reference_values(name: str, bounded: bool) -> None:
    wire, fmt = wire_of(name), parse(name)
    x = probes(wire.top)
    codes = wire.encode(x, bounded=bounded)
    assert codes.dtype == torch.uint8
    assert codes.numel() == x.numel() * (1 if fmt.bits <= 8 else 2)
    np.testing.assert_array_equal(wire.decode(codes, bounded=bounded).numpy(), reference_quantize(x, fmt).numpy())


@pytest.mark.parametrize("name", FORMATS)
def test_unbounded_values_overflow_by_the_formats_rule(name: str) -> None:
    wire, fmt = wire_of(name), parse(name)
    x = torch.tensor([fmt.largest, fmt.largest * 1.9, -3e38, torch.inf, -torch.inf], dtype=torch.float32)
    np.testing.assert_array_equal(wire.decode(wire.encode(x)).numpy(), reference_quantize(x, fmt).numpy())


@pytest.mark.parametrize("name", ["e5m2", "1-3-0", "1-4-3+4", "1-6-9", "linear", "dynamic-tree"])
def test_stochastic_codes_are_unbiased_neighbours(name: str) -> None:
    wire, g = wire_of(name), torch.Generator().manual_seed(1)
    for value in (0.37, -0.0123):
        x = torch.full((100_000,), value * 2.0**wire.top, dtype=torch.float32)
        y = wire.decode(wire.encode(x, generator=g))
        low, high = y.min(), y.max()
        assert y.unique().numel() == 2
        assert low < x[0] < high
        assert float(y.mean() - x[0]) == pytest.approx(0, abs=4 * float(high - low) / 2 / 100_000**0.5)


@pytest.mark.parametrize("name", ["e5m2", "1-4-3+4", "1-6-9"])
def test_stochastic_rounding_leaves_numbers_of_the_format_alone(name: str) -> None:
    wire = wire_of(name)
    x = wire.decode(wire.encode(probes(wire.top)))
    assert torch.equal(wire.decode(wire.encode(x, generator=torch.Generator().manual_seed(2))), x)


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # Inductor imports it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_large_tensors_run_compiled_with_the_same_codes() -> None:
    wire = wire_of("1-4-3+4")
    x = probes(wire.top)
    many = x.repeat(1 + rounding.COMPILE_ABOVE // x.numel())
    codes = wire.encode(many)
    assert torch.equal(codes[: x.numel()], wire.encode(x))
    assert torch.equal(wire.decode(codes)[: x.numel()], wire.decode(codes[: x.numel()]))


def test_formats_above_16_bits_are_refused_with_the_way_out() -> None:
    with pytest.raises(FormatError, match="32 bits; gradients are sent in codes of at most 16"):
        wire_of("fp32")


def test_exponents_are_exact_next_to_powers_of_two() -> None:
    two = torch.tensor([2.0**k for k in range(-115, 128)])
    above = torch.nextafter(two, torch.tensor(torch.inf))
    k = torch.arange(-115, 128)
    assert torch.equal(factor_exponents(exponent_codes(two), 15), (15 - k).int())
    assert torch.equal(factor_exponents(exponent_codes(above), 15), (15 - k - 1).int())


def test_exponents_of_zero_tiny_huge_and_non_finite_layers() -> None:
    x = torch.tensor([0.0, 2.0**-149, 3e38, torch.inf, torch.nan], dtype=torch.float32)
    codes = exponent_codes(x, num_terms=256)
    assert codes.dtype == torch.int8
    assert codes.tolist()[0] == ZERO_LAYER
    assert codes.tolist()[3:] == [NON_FINITE_LAYER] * 2
    assert factor_exponents(codes, 15).tolist() == [0, 15 + 115, 15 - 136, 0, 0]


def test_scaling_by_large_powers_is_exact() -> None:
    x = torch.tensor([2.0**-149, 3 * 2.0**-149], dtype=torch.float32)
    scale_by_powers(x, [(0, 2)], torch.tensor([200], dtype=torch.int32))
    assert x.tolist() == [2.0**51, 3 * 2.0**51]


def test_pieces_cover_the_bucket_once() -> None:
    for sizes in ((7, 0, 1, 12), (1,), (3, 3, 3), (100, 1)):
        for ranks in (1, 2, 3, 5, 8):
            lay = layout(sizes, ranks)
            covered = [i for p in lay.pieces for i in range(p.start, p.end)]
            assert covered == list(range(sum(sizes)))
            assert all(p.start // lay.chunk == (p.end - 1) // lay.chunk == p.owner for p in lay.pieces)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate": "fp23"}, "did you mean 'fp32'"),
        ({"group_size": 4, "bits": "by link", "link": "1Gbit/s"}, "link='1Gbit/s' must say both kinds of link"),
        ({"group_size": 4, "bits": "by link", "link": "1Gbit/s between; inside"}, "link rate '' is not understood"),
        ({"accumulate": "kahan", "group_size": 0}, "at least 1"),
        ({"high_steps": -1}, "at least 0"),
        ({"rounding": "up"}, "'nearest', 'stochastic'"),
    ],
)
def test_bad_options_say_the_way_out(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        APSOptions(**options)
