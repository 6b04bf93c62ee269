"""The compiled kernels: one compilation serves every format, with the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from codec_oracles import all_codes, assert_same, assert_same_codes, edges, random_bits, random_in_range
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxprec.errors import FxprecWarning
from fxprec.numerics import codec, memory, reference, rounding
from fxprec.numerics.formats import APS_130, BF16, E4M3FN, E5M2, FP16_169, FP32, HFP8_143, HFP8_152, Format
from fxprec.numerics.rounding import decode, encode, quantize

FORMATS = [HFP8_143, HFP8_152, FP16_169, FP32, BF16, E5M2, E4M3FN, APS_130, Format(8, 7), Format(6, 15)]


@pytest.fixture(autouse=True)
def _always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "COMPILE_ABOVE", 1 << 16)


def samples(fmt: Format) -> torch.Tensor:
    return torch.cat([edges(fmt), random_bits(1 << 17, 1), random_in_range(fmt, (1 << 17) + 3, 2)])


@pytest.mark.inductor
def test_quantize_is_the_reference_for_every_format() -> None:
    fused = rounding._fused(rounding._nearest, torch.float32, torch.float32, "cpu")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for fmt in FORMATS:
        x = samples(fmt)
        wanted = reference.reference_quantize(x, fmt)
        assert_same(quantize(x, fmt), wanted, x)
        assert quantize(x, fmt, out=x) is x
        assert_same(x, wanted, wanted)
    assert fused is rounding._fused(rounding._nearest, torch.float32, torch.float32, "cpu")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2  # into a new tensor, and in place


@pytest.mark.inductor
def test_codes_are_the_reference_for_every_format() -> None:
    for fmt in (HFP8_143, FP16_169, E5M2, E4M3FN, APS_130):  # uint8 and uint16: two compilations each way
        x = samples(fmt)
        assert_same_codes(encode(x, fmt), reference.reference_encode(x, fmt), x, fmt)
        codes = all_codes(fmt).repeat((1 << 16) // min(1 << fmt.bits, 1 << 16) + 1)
        assert_same(decode(codes, fmt), reference.reference_decode(codes, fmt), codes)


@pytest.mark.inductor
def test_stochastic_has_the_bits_of_the_small_path(monkeypatch: pytest.MonkeyPatch) -> None:
    x = samples(HFP8_143)
    fused = quantize(x, HFP8_143, "stochastic", torch.Generator().manual_seed(1))
    monkeypatch.setattr(rounding, "COMPILE_ABOVE", 1 << 40)
    assert_same(quantize(x, HFP8_143, "stochastic", torch.Generator().manual_seed(1)), fused, x)


@pytest.mark.inductor
def test_static_codec_fuses_bit_for_bit() -> None:
    formats = [HFP8_143, FP16_169, E4M3FN]

    def both(x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        codes = [codec.encode_bits(x, fmt) for fmt in formats]
        return [(code, codec.decode_bits(code, fmt)) for code, fmt in zip(codes, formats, strict=True)]

    x = torch.cat([samples(fmt) for fmt in formats])
    for (code, back), fmt in zip(torch.compile(both)(x), formats, strict=True):
        wanted = reference.reference_encode(x, fmt)
        assert_same_codes(code, wanted, x, fmt)
        assert_same(back, reference.reference_decode(wanted, fmt), x)


def test_a_kernel_that_does_not_compile_is_a_warning_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*key: object) -> object:
        def call(*args: object) -> None:
            raise torch._dynamo.exc.BackendCompilerFailed(None, RuntimeError("no compiler"), None)

        return call

    monkeypatch.setattr(rounding, "_fused", broken)
    monkeypatch.setattr(rounding, "_FAILED", set())
    x = random_in_range(HFP8_143, 1 << 17, 3)
    with pytest.warns(FxprecWarning, match="op by op, several times slower.*no compiler"):
        first = quantize(x, HFP8_143)
    assert_same(first, reference.reference_quantize(x, HFP8_143), x)
    assert_same(quantize(x, HFP8_143), first, x)  # and silent the second time


def test_advised_memory_is_ordinary_memory() -> None:
    x = torch.empty(3, (1 << 20) + 5)
    new = memory.empty_like(x, torch.float32)
    assert (new.shape, new.dtype, new.stride()) == (x.shape, torch.float32, x.stride())
    assert (new.fill_(2.5) == 2.5).all()


def test_a_formats_rows_are_made_once_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload waits for a GPU's stream, and every call made two."""
    given: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(rounding, "_fused", lambda *kinds: lambda x, random, *rows: given.append(rows[:-1]))
    x = torch.zeros((1 << 16) + 1)
    for fmt in (HFP8_143, HFP8_143, HFP8_152):
        quantize(x, fmt)
    first, again, other = given
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert not any(a is b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("makes_x_fake", [True, False])
def test_a_fake_mode_runs_no_kernel(makes_x_fake: bool) -> None:
    """The kernel reads memory, which a fake tensor has none of; and a cached row must be real."""
    x = torch.zeros((1 << 16) + 1)
    rounding._columns.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = quantize(mode.from_tensor(x) if makes_x_fake else x, HFP8_143)
    assert isinstance(found, FakeTensor)
    assert found.shape == x.shape
    assert rounding._columns.cache_info().currsize == 0
