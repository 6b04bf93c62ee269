"""The codec as Inductor's C++ loops have it: the reference's bits, of vectors, of a loop's rest, of single numbers."""

from __future__ import annotations

import pytest
import torch
from codec_oracles import assert_same, assert_same_codes, edges, random_bits, random_in_range
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from fxprec import compat
from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.numerics import reference
from fxprec.numerics.formats import parse
from fxprec.passes.lowering.in_loops import lower_casts

pytestmark = pytest.mark.inductor
FORMATS = {"e4m3fn": "native", "e5m2": "native", "1-4-3+4": "packed", "1-3-0": "packed", "1-5-2:ieee": "packed"}


def samples(name: str) -> Tensor:
    fmt = parse(name)
    return torch.cat([edges(fmt), random_bits(4096, 1), random_in_range(fmt, 4099, 2)])


def compiled(samples: dict[str, Tensor]) -> tuple[dict[str, tuple[Tensor, Tensor, Tensor]], str]:
    """Return codes of float32 and of bfloat16 samples and the numbers of all codes, by format, and the code."""
    table = torch.zeros(1, 16, dtype=torch.int32)

    def cast(samples: dict[str, Tensor], halves: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        found = {}
        for (name, storage), x in zip(FORMATS.items(), samples.values(), strict=True):
            codes = Quantize.target(x, table, 0, name, storage)
            narrow = Quantize.target(halves[name], table, 0, name, storage)
            # read from memory: a kernel that encodes would decode what it has
            read = Dequantize.target(codes.flip(0), table, 0, name, storage, torch.float32).flip(0)
            found[name] = codes, narrow, read
        return found

    lower_casts()
    torch.compiler.reset()
    with compat.calls_in_loops(), config.patch(fx_graph_cache=False):
        found, (code,) = run_and_get_code(
            torch.compile(cast), samples, {k: x.to(torch.bfloat16) for k, x in samples.items()}
        )
    return found, code


@pytest.mark.parametrize("lanes", [None, 1], ids=["vectors", "numbers"])
def test_casts_in_loops_are_the_reference(lanes: int | None) -> None:
    xs = {name: samples(name) for name in FORMATS}
    with config.patch({"cpp.simdlen": lanes}):
        found, code = compiled(xs)
    assert ("[](float x)" in code, "[](at::vec::Vectorized<float> x)" in code) == (lanes == 1, lanes is None)
    for name, (codes, narrow, read) in found.items():
        fmt, x = parse(name), xs[name]
        assert_same_codes(codes.view(fmt.code_dtype), reference.reference_encode(x, fmt), x, fmt)
        rounded = x.to(torch.bfloat16).float()
        assert_same_codes(narrow.view(fmt.code_dtype), reference.reference_encode(rounded, fmt), rounded, fmt)
        assert_same(read, reference.reference_decode(codes.view(fmt.code_dtype), fmt), x)


def test_a_cast_is_one_call_of_its_loop() -> None:
    _, code = compiled({name: samples(name) for name in FORMATS})
    assert code.count("{ using F") > 0
    assert "fxprec" not in code  # no kernel of ours, no operator that Inductor does not know
