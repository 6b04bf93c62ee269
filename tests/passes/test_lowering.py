"""Every lowering of the symbolic ops gives the bits of the plain reference: expansions, CPU kernels, statistics."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import assert_bits_equal

import fxprec.runtime.cpu.ops
import fxprec.runtime.reference_ops  # noqa: F401  both register implementations
from fxprec import codec, symbolic
from fxprec.formats import Format, parse
from fxprec.passes.lowering.expand import expand
from fxprec.runtime.reference import reference_decode, reference_encode, reference_quantize, reference_stats

NATIVE = ("bf16", "fp16", "e4m3fn", "e5m2")
NAMED = (*NATIVE, "1-4-3+4", "1-5-2", "1-6-9", "1-3-0", "1-2-1")


def random_formats(count: int) -> list[str]:
    pick = random.Random(0)
    names = []
    while len(names) < count:
        exponent, mantissa = pick.randint(1, 8), pick.randint(0, 10)
        if 2 <= 1 + exponent + mantissa <= 16:
            bias = 0 if exponent == 8 else pick.randint(-8, 8)
            names.append(f"1-{exponent}-{mantissa}" + (f"{bias:+d}" if bias else ""))
    return names


def bit_patterns(count: int, fmt: Format) -> torch.Tensor:
    """Random float32 bits, half of them near the format's range, with its edges, ties, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(1 << 31), 1 << 31, (count // 2,), generator=generator).to(torch.int32)
    near = torch.randn(count // 2, generator=generator) * torch.exp2(
        torch.randint(fmt.min_exponent - 3, fmt.max_exponent + 2, (count // 2,), generator=generator).clamp(-126, 126)
    )
    codes = reference_decode(torch.arange(1 << min(fmt.bits, 12)).to(torch.int32).to(fmt.code_dtype), fmt)
    values = codes[codes.isfinite()]
    ties = (values[1:] + values[:-1]) / 2
    edges = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 3.4e38, fmt.largest]
    return torch.cat([anything.view(torch.float32), near, ties, values, torch.tensor(edges)])


def table(fmt: Format, scale_exp: int) -> torch.Tensor:
    return torch.tensor([[0] * 8, [scale_exp, *codec.format_row(fmt)[1:]]], dtype=torch.int32)


def expanded(target, x: torch.Tensor, rows: torch.Tensor, *args, scaled: bool = True) -> torch.Tensor:
    graph = Graph()
    node, row = graph.placeholder("x"), graph.placeholder("table")
    node.meta["val"] = x
    graph.output(graph.call_function(target, (node, row, *args)))
    gm = GraphModule({}, graph)
    expand(gm, frozenset({1}) if scaled else frozenset())
    assert not gm.graph.find_nodes(op="call_function", target=target), "the op was replaced"
    return gm(x, rows)


def storages(name: str) -> list[str]:
    return ["simulate", "packed", "native"] if name in NATIVE else ["simulate", "packed"]


CASES = [(name, storage) for name in (*NAMED, *random_formats(6)) for storage in storages(name)]


@pytest.mark.parametrize("scale_exp", [0, 5, -7])
@pytest.mark.parametrize(("name", "storage"), CASES)
def test_expansion_equals_the_reference_op_bit_for_bit(name, storage, scale_exp):
    fmt = parse(name)
    x, rows = bit_patterns(40_000, fmt), table(fmt, scale_exp)
    args = (1, name, storage)
    q = expanded(symbolic.QUANTIZE, x, rows, *args, scaled=scale_exp != 0)
    wanted = symbolic.QUANTIZE(x, rows, *args)
    assert q.dtype == wanted.dtype
    value = expanded(symbolic.DEQUANTIZE, wanted, rows, *args, torch.float32, scaled=scale_exp != 0)
    assert_bits_equal(value, symbolic.DEQUANTIZE(wanted, rows, *args, torch.float32), "dequantize")
    number = ~x.isnan()  # of NaN the payload may differ between casts
    assert_bits_equal(q[number], wanted[number], "quantize")
    if storage == "simulate":
        assert q[~number].isnan().all()
    elif fmt.nan_code is not None:
        codes = q[~number].view(fmt.code_dtype)
        assert reference_decode(codes, fmt).isnan().all()


@pytest.mark.parametrize("scale_exp", [0, 5])
@pytest.mark.parametrize("storage", ["simulate", "packed"])
@pytest.mark.parametrize("name", ["1-4-3+4", "1-5-2", "1-6-9", "bf16"])
def test_expanded_statistics_equal_the_reference(name, storage, scale_exp):
    fmt = parse(name)
    x, rows = torch.randn(5000) * fmt.largest**0.5, table(fmt, scale_exp)
    x[:50] = torch.tensor(fmt.smallest_subnormal / 3) / 2**scale_exp
    got = expanded(symbolic.SITE_STATS, x, rows, 1, name, scaled=scale_exp != 0)
    wanted = reference_stats(x * 2.0**scale_exp, fmt)
    assert got.tolist() == pytest.approx([wanted.overflow / 5000, wanted.underflow / 5000, float(x.abs().max())])


@pytest.mark.parametrize("scale_exp", [0, 9])
@pytest.mark.parametrize("name", [*NAMED, *random_formats(12)])
def test_cpu_kernels_equal_the_reference_bit_for_bit(name, scale_exp):
    fmt = parse(name)
    x, rows = bit_patterns(200_000, fmt), table(fmt, scale_exp)
    scaled = x * 2.0**scale_exp
    codes, values, stats = symbolic.STORE(x, rows, 1, name, "packed", True)
    wanted = reference_encode(scaled, fmt)
    assert_bits_equal(codes.view(fmt.code_dtype), wanted, "codes")
    exact = ~x.isnan()  # a format without NaN keeps it among the values and saturates the code
    assert_bits_equal(values[exact], (reference_quantize(scaled, fmt) * 2.0**-scale_exp)[exact], "values")
    assert values[~exact].isnan().all()
    assert_bits_equal(symbolic.LOAD(codes, rows, 1, name), reference_decode(wanted, fmt) * 2.0**-scale_exp, "load")
    rounded, again = symbolic.ROUND(x, rows, 1, name, "simulate")
    assert_bits_equal(rounded, values, "round")
    counted = reference_stats(scaled, fmt)
    for got in (stats, again):
        ratios = torch.tensor([counted.overflow / x.numel(), counted.underflow / x.numel()])
        assert_bits_equal(got[:2], ratios, "ratios")
        assert got[2].isnan(), "amax shows the NaN"


@pytest.mark.parametrize("storage", ["packed", "simulate"])
def test_cpu_kernels_keep_layouts_and_take_any_strides(storage):
    fmt, rows = parse("1-4-3+4"), table(parse("1-4-3+4"), 0)
    x = torch.randn(2, 5, 6, 7)
    layouts = [x, x.to(memory_format=torch.channels_last), x[:, ::2], x[:, :, 1:, ::3], x.expand(3, 2, 5, 6, 7), x[:0]]
    for given in layouts:
        wanted = reference_quantize(given, fmt)
        rounded, _ = symbolic.ROUND(given, rows, 1, fmt.name, storage)
        assert_bits_equal(rounded, wanted)
        if storage == "packed":
            codes, values, _ = symbolic.STORE(given, rows, 1, fmt.name, storage, True)
            assert_bits_equal(values, wanted)
            assert_bits_equal(symbolic.LOAD(codes, rows, 1, fmt.name), wanted)
            if given.is_contiguous(memory_format=torch.channels_last) and given.dim() == 4 and given.numel():
                assert codes.stride() == given.stride()


def test_statistics_of_nothing_are_zero():
    rows = table(parse("1-4-3+4"), 0)
    _, stats = symbolic.ROUND(torch.empty(0), rows, 1, "1-4-3+4", "simulate")
    assert stats.tolist() == [0.0, 0.0, 0.0]
