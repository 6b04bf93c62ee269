"""Every lowering of the symbolic ops gives the bits of the plain reference: expansions, CPU kernels, statistics."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parents[1]))

from bit_patterns import NAMED, NATIVE, WIDE, bit_patterns, random_formats
from helpers import UNMEASURED, assert_bits_equal, finished

import fxprec.runtime.cpu.ops
import fxprec.runtime.gemm.ops
import fxprec.runtime.reference_ops  # noqa: F401  all register implementations
from fxprec.ir import symbolic
from fxprec.kernels import casts
from fxprec.numerics.formats import Format, parse
from fxprec.numerics.reference import reference_decode, reference_encode, reference_quantize, reference_stats
from fxprec.numerics.rows import format_row
from fxprec.passes.lowering.conversions import share_conversions, show_bytes_in_memory, widen_products
from fxprec.passes.lowering.expand import _keep_nonfinite, _quantize, expand
from fxprec.passes.lowering.layout import prefer_channels_last, share_channels_last
from fxprec.passes.lowering.round_in_place import can_round_in_place

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
FORCE = torch.ops.prims.inductor_force_stride_order.default


def table(fmt: Format, scale_exp: int, carried: int = 0, measure: bool = False) -> torch.Tensor:
    row = [scale_exp, *format_row(fmt)[1:], carried, int(measure)]
    return torch.tensor([[0] * symbolic.TABLE_COLUMNS, row], dtype=torch.int32)


def expanded(target, x: torch.Tensor, rows: torch.Tensor, *args, scaled=True, measured=False) -> torch.Tensor:
    graph = Graph()
    node, row = graph.placeholder("x"), graph.placeholder("table")
    node.meta["val"] = x
    graph.output(graph.call_function(target, (node, row, *args)))
    gm = GraphModule({}, graph)
    expand(gm, frozenset({1} if scaled else ()), frozenset({1} if measured else ()))
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


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_native_casts_for_gpus_overflow_as_the_format_says(name):
    """Those of torch do not: 2.11 casts 500 to a NaN of e4m3fn, 2.13 to 448, a GPU anything to the largest."""
    x, rows = bit_patterns(40_000, parse(name)), table(parse(name), 0)
    number = ~x.isnan()
    wanted = symbolic.QUANTIZE(x, rows, 1, name, "native")
    assert_bits_equal(_quantize(x, (), name, "native", False)[number], wanted[number], "quantize")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_codes_keep_inf_and_nan_as_non_finite(dtype):
    x = torch.tensor([3.0, torch.inf, -torch.inf, torch.nan])
    rounded = torch.full_like(x, 2.0).to(dtype)
    wanted = [2.0, *([torch.nan] * 2 if dtype == torch.float8_e4m3fn else [torch.inf, -torch.inf]), torch.nan]
    for keep in (symbolic.KEEP_NONFINITE, lambda *args: _keep_nonfinite(*args, ())):
        assert_bits_equal(keep(rounded, x).float().abs(), torch.tensor(wanted).abs(), "kept")


@pytest.mark.parametrize("scale_exp", [0, 5])
@pytest.mark.parametrize("storage", ["simulate", "packed"])
@pytest.mark.parametrize("name", ["1-4-3+4", "1-5-2", "1-6-9", "bf16"])
def test_expanded_statistics_equal_the_reference(name, storage, scale_exp):
    fmt = parse(name)
    x, rows = torch.randn(5000) * fmt.largest**0.5, table(fmt, scale_exp)
    x[:50] = torch.tensor(fmt.smallest_subnormal / 3) / 2**scale_exp
    got = expanded(symbolic.Count.target, x, rows, 1, name, scaled=scale_exp != 0)
    wanted = reference_stats(x * 2.0**scale_exp, fmt)
    amax = float(x.abs().max())
    basic = [wanted.overflow / 5000, wanted.underflow / 5000, amax]
    assert finished(got).tolist() == pytest.approx([*basic, *UNMEASURED])


@pytest.mark.parametrize("shape", [(6, 7, 300), (42, 300), (6, 7, 3, 5, 20), (12600,)])
@pytest.mark.parametrize("measured", [False, True])
def test_counts_by_rows_add_up_to_those_of_the_whole(shape, measured):
    """Rows of the last dimensions that are long enough; of anything else, the whole."""
    fmt = parse("e5m2")
    x = torch.randn(12600) * fmt.largest**0.5
    x[:40], x[40:50], x[-3] = 1e-9, 0.0, math.inf
    rows = table(fmt, 3, carried=1, measure=True)
    whole = x.view(6, 7, 300).transpose(0, 2)  # not in order: counted as one
    wanted = expanded(symbolic.Count.target, whole, rows, 1, "e5m2", measured=measured)
    found = expanded(symbolic.Count.target, x.view(shape), rows, 1, "e5m2", measured=measured)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
    assert found[1] == 40
    x[70] = math.nan
    assert expanded(symbolic.Count.target, x.view(shape), rows, 1, "e5m2", measured=measured)[2].isnan()


def on_a_gpu(function, *args: torch.Tensor, mode: str = "real") -> GraphModule:
    """The graph of ``function``, as far as a lowering for a GPU looks at it."""
    gm = make_fx(function, tracing_mode=mode)(*args)
    widen_products(gm)
    show_bytes_in_memory(gm)
    share_conversions(gm.graph)
    gm.graph.lint()
    return gm


def targets(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


BF16, CODES = torch.randn(16, 16, dtype=torch.bfloat16), torch.randn(16, 16).to(torch.float8_e4m3fn)


def test_a_gemm_on_a_gpu_writes_float32_where_only_the_graph_reads_it():
    assert targets(on_a_gpu(lambda a, b: [CONVERT(a @ b, torch.float32)], BF16, BF16)) == [aten.mm.dtype]
    kept = on_a_gpu(lambda a, b: [CONVERT(a @ b, torch.float32) * 2], BF16, BF16)
    assert aten.mm.default in targets(kept), "a kernel that reads it widens it on the way"
    both = on_a_gpu(lambda a, b: [CONVERT(p := a @ b, torch.float32), p], BF16, BF16)
    assert aten.mm.default in targets(both), "as it is, it is wanted too"


@pytest.mark.parametrize(("bias", "dtype"), [(None, torch.float32), (BF16[0], torch.bfloat16)])
def test_a_native_product_writes_float32_unless_it_adds_a_bias(bias, dtype):
    """cuBLASLt adds none to float32: "Bias is not supported when out_dtype is set to Float32"."""
    one = torch.tensor(1.0)
    native = on_a_gpu(
        lambda a, b: [CONVERT(aten._scaled_mm(a, b.t(), one, one, bias, None, torch.bfloat16), torch.float32)],
        CODES,
        CODES,
    )
    (gemm,) = native.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    assert gemm.args[6] == dtype
    assert (CONVERT in targets(native)) is (bias is not None)


def test_a_value_that_is_kept_is_narrowed_once():
    gm = on_a_gpu(lambda x: [CONVERT(x, torch.bfloat16) @ BF16, CONVERT(x, torch.bfloat16)], torch.randn(16, 16))
    assert targets(gm).count(CONVERT) == 1
    x = torch.randn(16, 16)
    _, kept = gm(x)
    assert_bits_equal(kept, x.bfloat16(), "kept")
    other = on_a_gpu(
        lambda x: [CONVERT(x, torch.float16) @ BF16.half(), CONVERT(x, torch.bfloat16)], torch.randn(16, 16)
    )
    assert targets(other).count(CONVERT) == 2, "another dtype is another value"


def test_bytes_are_transposed_before_they_are_shown_as_floats():
    def two_readers(x):
        codes = (x + 1).view(torch.float8_e4m3fn)
        return [torch.ops.fxprec.transpose_codes(codes), codes.view(2, -1)]

    gm = on_a_gpu(two_readers, torch.zeros(16, 16, dtype=torch.uint8), mode="fake")
    copy, *shown = targets(gm)[1:4]
    assert copy is torch.ops.fxprec.transpose_codes.default
    assert shown == [aten.view.dtype] * 2


def moments(x: torch.Tensor) -> list[float]:
    logs = x[x != 0].double().abs().log()
    share = logs.numel() / x.numel()
    return [float(x.double().square().mean().sqrt()), share, float(logs.mean()), float(logs.std(correction=0))]


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-45, 1e-30, 1e12])
def test_moments_are_those_of_the_gradient_without_its_scale(magnitude):
    """Whatever is carried in or added, on every path: reference, kernel, expansion."""
    x = torch.randn(70_000) * magnitude
    x[::3] = 0
    wanted = moments(x)
    carried = 20 if magnitude < 1 else -20
    rows = table(parse("1-5-2"), 7, carried, measure=True)
    given = x * 2.0**carried
    _, kernel = casts.ROUND(given, rows, 1, "1-5-2", "packed", False)
    reference = symbolic.Count.target(given, rows, 1, "1-5-2")
    for stats in map(finished, (kernel, reference)):
        assert stats[2].item() == float(x.abs().max())
        assert stats[3:].tolist() == pytest.approx(wanted, rel=2e-5, abs=2e-5)
    if 1e-12 < magnitude < 1e3:  # a compiled graph measures what it stores, near 1 once scaled
        code = expanded(symbolic.Count.target, given, rows, 1, "1-5-2", measured=True)
        assert finished(code).tolist() == pytest.approx(finished(kernel).tolist(), rel=2e-4, abs=2e-4 * magnitude)


@pytest.mark.parametrize("measured", [False, True])
def test_moments_are_returned_where_compiled_in_and_asked_for(measured):
    """A graph that measures in each step tells of it in those that are to measure: refreshes keep their interval."""
    x = torch.randn(4000)
    asked, unasked = (table(parse("1-5-2"), 3, 1, measure=m) for m in (True, False))
    found = [expanded(symbolic.Count.target, x, rows, 1, "1-5-2", measured=measured) for rows in (asked, unasked)]
    assert torch.equal(found[0][:4], found[1][:4])
    assert torch.equal(found[0][8:], found[1][8:])
    assert finished(found[1])[3:].tolist() == list(UNMEASURED)
    assert (found[0][4] > 0) == measured


@pytest.mark.parametrize("fill", [0.0, 3.0])
def test_moments_of_equal_values(fill):
    rows = table(parse("1-5-2"), 0, measure=True)
    x = torch.full((4000,), fill)
    for counts in (casts.ROUND(x, rows, 1, "1-5-2", "packed", False)[1], symbolic.Count.target(x, rows, 1, "1-5-2")):
        stats = finished(counts)
        assert stats[3:].tolist() == pytest.approx(
            [fill, float(fill > 0), math.log(fill) if fill else 0, 0.0], abs=2e-5
        )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["1-5-2", "fp16_sat", "e5m2_sat"])
def test_inf_and_nan_of_a_gradient_are_kept_where_asked(name, keep):
    """And what is finite saturates, also where the scale itself lifts it beyond float32."""
    fmt, rows = parse(name), table(parse(name), 60)
    x = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan, 0.0])
    values, _ = casts.ROUND(x, rows, 1, name, "packed", keep)
    limit = torch.inf if keep else fmt.largest
    assert values[:4].tolist() == [fmt.largest, -fmt.largest, limit, -limit]
    assert values[4].isnan()
    rounded = reference_quantize(x * 2.0**60, fmt)
    assert_bits_equal(values, symbolic.KEEP_NONFINITE(rounded, x) if keep else rounded)


@pytest.mark.parametrize("scale_exp", [0, 9])
@pytest.mark.parametrize("name", [*NAMED, *random_formats(12), *WIDE])
def test_cpu_kernels_equal_the_reference_bit_for_bit(name, scale_exp):
    fmt = parse(name)
    x, rows = bit_patterns(200_000, fmt), table(fmt, scale_exp)
    scaled = x * 2.0**scale_exp
    codes, values, stats = casts.STORE(x, rows, 1, name, "packed", True, False)
    wanted = reference_encode(scaled, fmt)
    assert_bits_equal(codes.view(fmt.code_dtype), wanted, "codes")
    exact = ~x.isnan()  # a format without NaN keeps it among the values and saturates the code
    assert_bits_equal(
        values[exact], reference_quantize(scaled, fmt)[exact], "values, at the scale they are stored with"
    )
    assert values[~exact].isnan().all()
    assert_bits_equal(casts.LOAD(codes, rows, 1, name), reference_decode(wanted, fmt) * 2.0**-scale_exp, "load")
    assert_bits_equal(casts.LOAD(codes, rows, symbolic.AS_STORED, name), reference_decode(wanted, fmt), "as stored")
    rounded, again = casts.ROUND(x, rows, 1, name, "simulate", False)
    assert_bits_equal(rounded, values, "round")
    over, over2 = x.clone(), x.clone()
    codes_, stats_ = casts.STORE_(over, rows, 1, name, "packed", False)
    again_ = casts.ROUND_(over2, rows, 1, name, "simulate", False)
    for got, kept in ((codes_, codes), (over, values), (over2, values)):
        assert_bits_equal(got, kept, "in place")
    counted = reference_stats(scaled, fmt)
    for got in (stats, again, stats_, again_):
        overflow, underflow, amax, elements = got[:4].tolist()
        assert (overflow, underflow, elements) == (counted.overflow, counted.underflow, x.numel())
        assert math.isnan(amax), "amax shows the NaN"


@pytest.mark.parametrize("storage", ["packed", "simulate"])
def test_cpu_kernels_keep_layouts_and_take_any_strides(storage):
    fmt, rows = parse("1-4-3+4"), table(parse("1-4-3+4"), 0)
    x = torch.randn(2, 5, 6, 7)
    last = x.to(memory_format=torch.channels_last)
    layouts = [x, last, x[:, ::2], last[:, 1:3], x[:, :, 1:, ::3], x.expand(3, 2, 5, 6, 7), x[:0]]
    for given in layouts:
        promised = torch.empty_like(given).stride()
        wanted = reference_quantize(given, fmt)
        rounded, _ = casts.ROUND(given, rows, 1, fmt.name, storage, False)
        assert_bits_equal(rounded, wanted)
        assert rounded.stride() == promised
        if storage == "packed":
            codes, values, _ = casts.STORE(given, rows, 1, fmt.name, storage, True, False)
            assert_bits_equal(values, wanted)
            assert_bits_equal(casts.LOAD(codes, rows, 1, fmt.name), wanted)
            assert codes.stride() == values.stride() == promised


def test_statistics_of_nothing_are_zero():
    rows = table(parse("1-4-3+4"), 0)
    _, stats = casts.ROUND(torch.empty(0), rows, 1, "1-4-3+4", "simulate", False)
    assert finished(stats).tolist() == [0.0, 0.0, 0.0, *UNMEASURED]


def _traced_with_a_quantize(function, *inputs):
    """Trace ``function`` to a graph and quantize what it returns; return the graph and the quantize node."""
    gm = make_fx(function)(*inputs)
    graph, output = gm.graph, gm.graph.output_node()
    x = output.args[0]
    with graph.inserting_before(output):
        table_ = graph.call_function(torch.zeros, ((4, symbolic.TABLE_COLUMNS),))
        q = graph.call_function(symbolic.QUANTIZE, (x, table_, 1, "1-4-3+4", "packed"))
        q.meta["val"] = torch.empty_like(x.meta["val"], dtype=torch.uint8)
    output.args = (q,)
    return graph, q


PICTURES, KERNEL = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
ALONE = {
    "convolution": (lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), True),
    "pointwise": (lambda x, w: aten.relu(aten.mul(x, 2.0)), True),
    "sum": (lambda x, w: aten.add(aten.relu(x), aten.tanh(x)), True),
    "input": (lambda x, w: x, False),
    "view of an input": (lambda x, w: aten.view(x, [6, 25]), False),
    "view": (lambda x, w: aten.permute(aten.relu(x), [0, 2, 3, 1]), False),
    "sum with an input": (lambda x, w: aten.add(x, aten.relu(x)), False),
    "sum with a constant": (lambda x, w: aten.add(aten.relu(x), aten.full([2, 3, 5, 5], 0.0)), False),
    "number": (lambda x, w: aten.add(aten.relu(x), 0), False),
    "overlapping": (lambda x, w: aten.expand(aten.relu(x), [7, 2, 3, 5, 5]), False),
    "other dtype": (lambda x, w: aten.relu(x.double()), False),
}


@pytest.mark.parametrize("name", ALONE)
def test_only_memory_of_its_own_is_rounded_in_place(name):
    function, wanted = ALONE[name]
    _, q = _traced_with_a_quantize(function, PICTURES, KERNEL)
    assert can_round_in_place(q.args[0]) is wanted


def test_a_tensor_read_twice_is_not_rounded_in_place():
    graph, q = _traced_with_a_quantize(lambda x, w: aten.relu(x), PICTURES, KERNEL)
    with graph.inserting_before(q):
        graph.call_function(aten.neg.default, (q.args[0],))
    assert not can_round_in_place(q.args[0])


def test_what_a_convolution_touches_is_stored_channels_last():
    graph, q = _traced_with_a_quantize(ALONE["convolution"][0], PICTURES, KERNEL)
    conv = q.args[0]
    prefer_channels_last(graph)
    force = q.args[0]
    assert (force.target, force.args) == (FORCE, (conv, [100, 1, 20, 4]))
    assert can_round_in_place(force)
    graph, q = _traced_with_a_quantize(ALONE["input"][0], PICTURES, KERNEL)
    with graph.inserting_after(q):
        reader = graph.call_function(symbolic.DEQUANTIZE, (q, *q.args[1:], torch.float32))
    prefer_channels_last(graph)
    assert q.args[0].op == "placeholder", "no convolution reads it"
    with graph.inserting_after(reader):
        graph.call_function(aten.convolution.default, (reader, reader))
    prefer_channels_last(graph)
    assert q.args[0].target is FORCE
    assert not can_round_in_place(q.args[0]), "it may be the input itself"


def _convolved_twice(x, kernel, w, gradient):
    """A concat that a convolution and a weight's gradient read, as where backward computes it again."""
    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    made = aten.convolution.default(x, kernel, None, *window)
    joined = aten.cat.default([made, aten.relu.default(made)], 1)
    again = aten.convolution.default(joined, w, None, *window)
    both = aten.convolution_backward.default(
        aten.mul.Tensor(gradient, again), joined, w, [0], *window, [False, True, False]
    )
    return both[1]


def test_what_convolutions_share_lies_channels_last_once():
    shapes = (2, 16, 8, 8), (16, 16, 3, 3), (4, 32, 3, 3), (2, 4, 8, 8)
    inputs = tuple(torch.randn(shape).bfloat16() for shape in shapes)
    plain, shared = make_fx(_convolved_twice)(*inputs), make_fx(_convolved_twice)(*inputs)
    share_channels_last(shared.graph)
    shared.recompile()
    (joined,) = shared.graph.find_nodes(op="call_function", target=aten.cat.default)
    (forced,) = joined.users
    assert (forced.target, forced.args[1], len(forced.users)) == (FORCE, [2048, 1, 256, 32], 2)
    assert not shared.graph.find_nodes(op="placeholder")[2].users.keys() & {forced}, "inputs are left as they lie"
    assert_bits_equal(shared(*inputs), plain(*inputs))
    whole = "empty_strided_cpu((2, 32, 8, 8)"
    copies = []
    for gm in (plain, shared):
        found, (code,) = run_and_get_code(torch.compile(gm), *inputs)
        assert_bits_equal(found, _convolved_twice(*inputs))
        copies.append(code.partition("def call")[2].count(whole))
    assert copies[1] == 1 < copies[0], "the concat itself"
