"""Every C++ kernel behind its Python entry, given tensors of any kind: the bits of the plain reference, or a typed error.

`./dev asan` runs this with more examples, the kernels built with AddressSanitizer.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optim.rules import RULES, numbers_of, row_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxprec.errors import FormatError, FxprecError, NativeArgumentError
from fxprec.ir.symbolic import AS_STORED, CARRIED, MEASURE, TABLE_COLUMNS
from fxprec.numerics import native, rounding
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import MAGNITUDE, format_row
from fxprec.numerics.stats import Counts, finish
from fxprec.runtime import reference_ops
from fxprec.runtime.aps import codecs, kernels
from fxprec.runtime.arith import cpu as arith_cpu
from fxprec.runtime.arith import reference as arith_reference
from fxprec.runtime.arith.spec import Spec
from fxprec.runtime.cpu import measure, ops
from fxprec.runtime.optim import cpp
from fxprec.runtime.optim import reference as optim_reference

EXAMPLES = int(os.environ.get("FXPREC_FUZZ_EXAMPLES", "25"))
# Nothing is left over from earlier runs, and the gate tries the same every time.
fuzz = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=EXAMPLES <= 25,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e5m2, torch.complex64,
)  # fmt: skip
SIZES = (0, 1, 3, 64, 129, 33_000)  # the last is worked on by several threads
HUGE = 1 << 46  # elements: no machine has the address space
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38, -1.5)


def numbers(count: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=g) * 2.0 ** torch.randint(-30, 30, (count,), generator=g)
    x[: len(EDGES)] = torch.tensor(EDGES)[:count]
    return x


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def faked(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


def overlapping(x: Tensor) -> Tensor:
    flat = x.flatten()
    return flat if flat.numel() < 4 else flat.as_strided((flat.numel() // 2, 3), (1, 1))


def negated(x: Tensor) -> Tensor:
    return torch.imag(torch.complex(x, -x).conj()) if x.dtype == torch.float32 else x


# What may be done to a tensor before it comes.
SAME: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
READABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": SAME,
    "transposed": lambda x: x.reshape(-1, 3 if x.numel() % 3 == 0 else 1).t(),
    "channels last": lambda x: x.reshape(1, -1, 1, 1).contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(5, *x[:1].shape) if x.dim() else x.expand(5),
    "overlapping": overlapping,
    "offset": lambda x: torch.cat([x.flatten(), x.flatten()])[x.numel() :],
    "a column of some": lambda x: torch.stack([x.flatten()] * 4, 1)[:, 1::2][:, 1:],
    "every other": lambda x: torch.stack([x.flatten(), x.flatten()], 1)[:, 1],
    "no dimension": lambda x: x.flatten()[0] if x.numel() else x,
    "negated when read": negated,
    "needs a gradient": lambda x: x.clone().requires_grad_() if x.dtype == torch.float32 else x,
}
UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "meta": lambda x: x.to("meta"),
    "fake": faked,
    "freed": freed,
    "sparse": lambda x: x.to_sparse(),
    "huge": lambda x: x.new_zeros(1).expand(HUGE),
}

readable = st.sampled_from(sorted(READABLE))
any_kind = st.sampled_from(sorted(READABLE) + sorted(UNREADABLE))
seeds = st.integers(0, 99)
sizes = st.sampled_from(SIZES)
dtypes = st.one_of(st.just(torch.float32), st.sampled_from(DTYPES))


def made(size: int, seed: int, dtype: torch.dtype, kind: str) -> Tensor:
    x = numbers(size, seed)
    x = x.to(dtype) if dtype.is_floating_point or dtype.is_complex else x.nan_to_num(0, 9, 9).clamp(0, 9).to(dtype)
    if kind in UNREADABLE and not (dtype == torch.float8_e5m2 and kind == "sparse"):
        return UNREADABLE[kind](x)
    return READABLE.get(kind, SAME)(x)


def same(found: Tensor, wanted: Tensor) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if found.dtype == torch.float32:
        assert torch.equal(found.isnan(), wanted.isnan())
        found, wanted = (t.nan_to_num(0, math.inf, -math.inf).contiguous().view(torch.int32) for t in (found, wanted))
    assert torch.equal(found, wanted)


def attempted(call: Callable[[], Any], kind: str = "") -> Any:
    """The result, or None where it is refused in one line that says what is wanted."""
    try:
        return call()
    except FxprecError as error:
        if "\n" in str(error):
            raise
    except RuntimeError:  # torch's own word, before any kernel: that much memory is not to be had
        if kind != "huge":
            raise
    return None


def table_of(name: str, scale: int, measured: bool) -> Tensor:
    table = torch.zeros(2, TABLE_COLUMNS, dtype=torch.int32)
    table[1, :CARRIED] = torch.tensor(format_row(parse(name)))
    table[1, 0], table[1, MEASURE] = scale, measured
    return table


STORED = [("1-4-3", "packed"), ("e5m2", "native"), ("1-6-9", "packed"), ("bf16", "native"), ("1-8-13", "packed")]
stores = st.sampled_from(STORED)


@fuzz
@given(sizes, seeds, dtypes, any_kind, stores, st.integers(-9, 9), st.booleans(), st.booleans())
def test_store_and_round(size, seed, dtype, kind, stored, scale, value, measured) -> None:
    name, storage = stored
    x, table = made(size, seed, dtype, kind), table_of(name, scale, measured)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of what complex numbers lose
        found = attempted(lambda: ops.store(x, table, 1, name, storage, value, False), kind)
        rounded = attempted(lambda: ops.round_values(x, table, 1, name, storage, False), kind)
        again = x if kind in UNREADABLE else x.clone()  # cloning reads
        over = attempted(lambda: ops.store_(again, table, 1, name, storage, False))
    assert (found is None) == (rounded is None)
    if kind in UNREADABLE and size:
        assert found is None or kind in ("sparse", "huge")
    if found is None:
        return
    codes = reference_ops.quantize(x, table, 1, name, storage)
    values = reference_ops.quantize(x, table, 1, name, "simulate")
    same(found[0].view(parse(name).code_dtype), codes.view(parse(name).code_dtype))
    same(rounded[0], values)
    if value:
        same(found[1], values)
    if over is not None:
        same(over[0].view(parse(name).code_dtype), codes.view(parse(name).code_dtype))
    wanted = reference_ops.counts(x.detach().float(), table, 1, name)
    torch.testing.assert_close(found[2][:4], wanted[:4], equal_nan=True)
    torch.testing.assert_close(found[2], rounded[1], equal_nan=True)


@fuzz
@given(sizes, seeds, dtypes, any_kind, stores, st.sampled_from([AS_STORED, 0, 1, 2, -2]))
def test_load(size, seed, dtype, kind, stored, row) -> None:
    """Codes of the format, now and then; else whatever comes."""
    name, storage = stored
    table = table_of(name, 3, False)
    q = made(size, seed, dtype, kind)
    if dtype == torch.float32 and kind in READABLE:
        q = reference_ops.quantize(q, table, 1, name, storage)
    found = attempted(lambda: ops.load(q, table, row, name), kind)
    wanted_dtypes = (parse(name).code_dtype, parse(name).torch_dtype)
    if q.dtype not in wanted_dtypes or row not in (AS_STORED, 0, 1) or (kind in UNREADABLE and size):
        assert found is None or kind in ("sparse", "huge")
    else:
        same(found, reference_ops.dequantize(q, table, row, name, "packed", torch.float32))


@fuzz
@given(sizes, seeds, dtypes, any_kind)
def test_moments(size, seed, dtype, kind) -> None:
    x = made(size, seed, dtype, kind)
    finite = x.nan_to_num(0, 1, 1) if x.dtype == torch.float32 and kind in READABLE else x
    found = attempted(lambda: measure.moments_of(finite, 3e38 if kind in UNREADABLE else _amax(finite)), kind)
    if found is not None and finite.numel() and 0 < _amax(finite) < 1e30:
        wanted = reference_ops.measured_moments(finite)
        mine, theirs = (_finished(finite.numel(), sums) for sums in (found, wanted))
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-3)


def _finished(elements: int, sums: tuple[float, ...]) -> tuple[float, ...]:
    counts = torch.tensor([Counts(0, 0, 0, elements, *sums, 0, 0)], dtype=torch.float64)
    return finish(counts)[0][3:]


def _amax(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() and x.dtype == torch.float32 else 1.0


SPECS = [Spec(parse("1-4-3"), parse("1-5-2"), True, 16), Spec(parse("bf16"), parse("fp32"))]


@fuzz
@given(st.tuples(*[st.integers(0, 70)] * 3), seeds, dtypes, st.tuples(any_kind, any_kind), st.sampled_from(SPECS))
def test_matmul(shape, seed, dtype, kinds, spec) -> None:
    (m, k, n), operands = shape, []
    for rows, columns, kind in ((m, k, kinds[0]), (k, n, kinds[1])):
        x = made(rows * columns, seed, dtype, kind)
        operands.append(x.reshape(rows, columns) if kind in READABLE and x.numel() == rows * columns else x)
    a, b = operands
    found = attempted(lambda: arith_cpu.matmul(a, b, spec), "huge" if "huge" in kinds else "")
    if found is None:
        assert dtype != torch.float32 or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or not (
            set(kinds) <= set(READABLE)
        )  # fmt: skip
    else:
        same(found, arith_reference.matmul(a.detach(), b.detach(), spec))


KINDS = [parse("1-4-3"), parse("e5m2"), codecs.codec("dynamic-tree"), parse("bf16")]


@fuzz
@given(sizes, sizes, seeds, dtypes, st.sampled_from([torch.uint8, torch.int8, torch.int16]), any_kind, any_kind,
       st.sampled_from(KINDS))  # fmt: skip
def test_encode(size, out_size, seed, dtype, out_dtype, kind, out_kind, fmt) -> None:
    x = made(size, seed, dtype, kind)
    out = made(out_size if seed % 2 else x.numel() if x.numel() < HUGE else 1, seed, torch.float32, "as it is")
    out = out.nan_to_num(0).clamp(0, 9).to(out_dtype)
    out = READABLE[out_kind](out) if out_kind in READABLE else UNREADABLE[out_kind](out)

    def call() -> Tensor:
        kernels.encode(x, 2, fmt, out)
        return out

    found = attempted(call)
    if found is not None:
        scaled = x.detach().flatten() * 4
        wanted = codecs.encode_values(scaled, fmt) if isinstance(fmt, codecs.Codec) else rounding.encode(scaled, fmt)
        assert not x.numel() or torch.equal(found.flatten()[scaled.isfinite()], wanted[scaled.isfinite()])


@fuzz
@given(sizes, st.integers(0, 3), seeds, st.sampled_from([torch.uint8, torch.int16, torch.float32]), any_kind,
       st.sampled_from([0, 1, 255, 256, 512]), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))  # fmt: skip
def test_sum_and_look_up(size, rows, seed, dtype, kind, entries, table_dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, size), generator=g).to(dtype)
    codes = READABLE[kind](codes) if kind in READABLE else UNREADABLE[kind](codes)
    table, out = (
        torch.randn(entries, generator=g).to(table_dtype),
        torch.empty(codes.numel() if codes.numel() < HUGE else 1),
    )

    def look_up() -> Tensor:
        kernels.look_up(codes, table, out)
        return out

    looked_up = attempted(look_up)
    summed = attempted(lambda: kernels.sum_rows(codes, table))
    right = table_dtype == torch.float32 and entries == 256 and dtype == torch.uint8
    if not right and kind != "sparse":
        assert (looked_up, summed) == (None, None)
    if looked_up is not None:
        same(looked_up, table[codes.flatten().int()] if codes.is_contiguous() else looked_up)
    if summed is not None and codes.is_contiguous():
        wanted = torch.zeros(codes.shape[1])
        for i, row in enumerate(codes):
            wanted = table[row.int()] if i == 0 else wanted + table[row.int()]
        same(summed, wanted)


@fuzz
@given(sizes, seeds, dtypes, any_kind)
def test_largest_magnitude(size, seed, dtype, kind) -> None:
    x = made(size, seed, dtype, kind)
    found = attempted(lambda: kernels.largest_bits(x))
    if found is not None and x.numel():
        wanted = x.detach().contiguous().resolve_neg().view(torch.int32) & MAGNITUDE
        assert found == int(wanted.max())


@fuzz
@given(st.sampled_from(sorted({0, 3})), st.sampled_from([0, 1, 3, 40, 20_000]), seeds, st.sampled_from([*RULES[:2], RULES[8]]),
       st.integers(0, 3), any_kind, dtypes, st.sampled_from(["tensor", "scalars", "integers", "counts", "nothing"]))  # fmt: skip
def test_optimizer_step(missing, size, seed, rule, which, kind, dtype, broken) -> None:
    """One tensor of the second row, or one of the tables of numbers, is of another kind."""
    rows = [row_of(rule, 50, seed), row_of(rule, size, seed + 1)]
    wanted = [[t.clone() for t in row] for row in rows]
    scalars, integers = numbers_of(rule, 2)
    tables = {"scalars": scalars, "integers": integers, "counts": torch.zeros(2, 2, dtype=torch.int64)}
    if broken == "tensor":
        which %= len(rows[1])
        rows[1][which] = made(size, seed, rule.carrier if seed % 2 else dtype, kind)
        wanted[1][which] = rows[1][which]
    elif broken in tables:
        tables[broken] = tables[broken][: 2 - missing] if seed % 2 else tables[broken].to(torch.float64)
    done = attempted(lambda: cpp.run(rule, rows, *tables.values()))
    if broken in tables and (missing or not seed % 2):
        assert done is None
    if not done or broken == "tensor":
        return
    for i, (found, right) in enumerate(zip(rows, wanted, strict=True)):
        optim_reference.run(rule, right, scalars[i], integers[i], torch.zeros(2, dtype=torch.int64))
        for a, b in zip(found, right, strict=True):
            assert bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(4, dtype=torch.bfloat16), "x is 4 elements of bfloat16 on cpu with strides .* walks 4 elements of float32"),
        (torch.ones(3), "x is 3 elements of float32 on cpu .* walks 4 elements of float32 on cpu in memory without gaps"),
        (torch.ones(8)[::2], r"with strides \(2,\) in 32 bytes; .* give a dense tensor of that kind"),
        (torch.ones(1).expand(4), r"with strides \(0,\) in 4 bytes"),
        (torch.ones(4, device="meta"), "4 elements of float32 on meta"),
        (torch.ones(4).to_sparse(), "sparse_coo; a compiled kernel"),
        (negated(torch.ones(4)), "negated only when read"),
        (faked(torch.ones(4)), "a FakeTensor without memory of its own"),
        (freed(torch.ones(4)), "in 0 bytes"),
    ],
    ids=["dtype", "size", "strided", "expanded", "device", "layout", "negated", "fake", "freed"],
)  # fmt: skip
def test_what_is_refused_and_what_it_says(tensor: Tensor, words: str) -> None:
    with pytest.raises(NativeArgumentError, match=words):
        native.address("x", tensor, torch.float32, 4)


def test_an_order_of_its_own_is_refused() -> None:
    x = torch.ones(2, 3)
    assert native.address("x", x.t(), torch.float32, 6) == x.data_ptr()
    with pytest.raises(NativeArgumentError, match=r"walks 6 elements of float32 on cpu with strides \(3, 1\)"):
        native.address("values", x.t(), torch.float32, 6, like=x)


def test_a_format_too_wide_for_a_byte_is_refused() -> None:
    with pytest.raises(FormatError, match="bf16 has 16 bits"):
        kernels.encode(torch.ones(4), 0, parse("bf16"), torch.zeros(4, dtype=torch.uint8))
