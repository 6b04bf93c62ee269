"""The codec as Inductor's C++ loops have it: the reference's bits, of vectors, of a loop's rest, of single numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from codec_oracles import all_codes, assert_same, assert_same_codes, edges, random_bits, random_in_range
from torch import Tensor
from torch._inductor import config
from torch._inductor.cpu_vec_isa import VecAVX2, valid_vec_isa_list
from torch._inductor.utils import run_and_get_code

from fxprec import compat
from fxprec.ir.symbolic import Dequantize, Quantize, stored_dtype
from fxprec.numerics import reference
from fxprec.numerics.formats import parse
from fxprec.passes.lowering.in_loops import lower_casts

pytestmark = pytest.mark.inductor
FORMATS = {"e4m3fn": "native", "e5m2": "native", "1-4-3+4": "packed", "1-3-0": "packed", "1-5-2:ieee": "packed"}

ALL_BF16 = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)


def samples(name: str) -> Tensor:
    fmt = parse(name)
    return torch.cat([edges(fmt), random_bits(4096, 1), random_in_range(fmt, 4099, 2), ALL_BF16])


def codes_in_memory(name: str) -> Tensor:
    """Every code, and some again, for a loop's rest."""
    fmt, storage = parse(name), FORMATS[name]
    return torch.cat([all_codes(fmt), all_codes(fmt)[-13:]]).view(stored_dtype(fmt, storage))


def compiled(samples: dict[str, Tensor]) -> tuple[dict[str, tuple[Tensor, Tensor, Tensor, Tensor]], str]:
    """Return by format codes of float32 and of bfloat16 samples, their numbers and those of all codes; and the code."""
    table = torch.zeros(1, 16, dtype=torch.int32)

    def cast(
        samples: dict[str, Tensor], halves: dict[str, Tensor], stored: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
        found = {}
        for (name, storage), x in zip(FORMATS.items(), samples.values(), strict=True):
            codes = Quantize.target(x, table, 0, name, storage)
            narrow = Quantize.target(halves[name], table, 0, name, storage)
            back = Dequantize.target(codes, table, 0, name, storage, torch.float32)  # of codes in registers
            read = Dequantize.target(stored[name], table, 0, name, storage, torch.float32)
            found[name] = codes, narrow, back, read
        return found

    halves = {name: x.to(torch.bfloat16) for name, x in samples.items()}
    stored = {name: codes_in_memory(name) for name in FORMATS}
    lower_casts()
    torch.compiler.reset()
    with as_in_the_driver(), config.patch(fx_graph_cache=False):
        found, (code,) = run_and_get_code(torch.compile(cast), samples, halves, stored)
    return found, code


@contextmanager
def as_in_the_driver() -> Iterator[None]:
    with compat.tiles_for_bytes(), compat.bitcasts_in_loops(), compat.calls_in_loops():
        yield


def needs_avx2() -> None:
    """Skip on a processor without AVX2. Asked in a test and not at collection: torch compiles a program to answer."""
    if not any(isinstance(isa, VecAVX2) for isa in valid_vec_isa_list()):
        pytest.skip("a processor without AVX2")


@pytest.mark.parametrize("lanes", [None, 256, 1], ids=["vectors", "AVX2 vectors", "numbers"])
def test_casts_in_loops_are_the_reference(lanes: int | None) -> None:
    if lanes == 256:
        needs_avx2()
    xs = {name: samples(name) for name in FORMATS}
    with config.patch({"cpp.simdlen": lanes}):
        found, code = compiled(xs)
    assert ("[](float x)" in code, "[](at::vec::Vectorized<float> x)" in code) == (lanes == 1, lanes != 1)
    if lanes == 256:
        assert all(text in code for text in ("_mm_loadl_epi64", "_mm_loadu_si128", "_mm256_shuffle_epi8"))
    for name, (codes, narrow, back, read) in found.items():
        fmt, x = parse(name), xs[name]
        assert_same_codes(codes.view(fmt.code_dtype), reference.reference_encode(x, fmt), x, fmt)
        rounded = x.to(torch.bfloat16).float()
        assert_same_codes(narrow.view(fmt.code_dtype), reference.reference_encode(rounded, fmt), rounded, fmt)
        assert_same(back, reference.reference_decode(codes.view(fmt.code_dtype), fmt), x)
        stored = codes_in_memory(name).view(fmt.code_dtype)
        assert_same(read, reference.reference_decode(stored, fmt), stored)


def test_a_cast_is_one_call_of_its_loop() -> None:
    _, code = compiled({name: samples(name) for name in FORMATS})
    assert code.count("{ using F") > 0
    assert "fxprec" not in code  # no kernel of ours, no operator that Inductor does not know


def test_nothing_is_divided_by_what_lies_beyond_8_bytes() -> None:
    """ATen divides all 32 bytes of a vector, and a loop over 8 elements loads 8: a 0 beyond would end the process."""
    needs_avx2()

    def quotients(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.div(a, b, rounding_mode="floor"), a.float() * x

    a, b = torch.arange(64, dtype=torch.uint8), torch.full((64,), 3, dtype=torch.uint8)
    x = torch.linspace(-1, 1, 64)
    torch.compiler.reset()
    with as_in_the_driver(), config.patch({"fx_graph_cache": False, "cpp.simdlen": 256}):
        found, (code,) = run_and_get_code(torch.compile(quotients), a, b, x)
    assert "_mm_loadl_epi64" in code
    for got, want in zip(found, quotients(a, b, x), strict=True):
        assert torch.equal(got, want)
