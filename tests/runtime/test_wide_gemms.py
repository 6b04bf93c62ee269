"""16-bit GEMMs in float32 by blocks: ATen's results in float32, rounded once, laid out as promised."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fxprec.runtime.cpu.wide_gemms
from fxprec.config.processor import Processor
from fxprec.kernels import wide_gemms
from fxprec.kernels.wide_gemms import WIDE
from fxprec.passes.analysis.replay.workspace import workspace

sys.path.insert(0, str(Path(__file__).parents[1]))

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
DTYPES = (torch.bfloat16, torch.float16)
BLOCK = wide_gemms.BLOCK


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def mapped(function: Any, args: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    one = lambda x: function(x) if isinstance(x, Tensor) else x  # noqa: E731
    return [one(x) for x in args], {name: one(x) for name, x in options.items()}


def results_of(found: Any) -> list[Any]:
    return [found] if isinstance(found, Tensor) else list(found)


def assert_right(operator: Any, *args: Any, **options: Any) -> None:
    """Each result within half a unit of float32's, beside what sums in another order differ by; and as its fake lies."""
    found = results_of(WIDE[operator](*args, **options))
    wide, wide_options = mapped(Tensor.float, args, options)
    wanted = results_of(operator(*wide, **wide_options))
    mode = FakeTensorMode()
    fake, fake_options = mapped(mode.from_tensor, args, options)
    with mode:
        promised = results_of(WIDE[operator](*fake, **fake_options))
    for got, right, like in zip(found, wanted, promised, strict=True):
        if got is None:
            assert like is None
            continue
        assert (got.shape, got.dtype, got.stride()) == (like.shape, like.dtype, like.stride())
        unit = torch.finfo(got.dtype).eps / 2
        noise = 1e-5 * right.norm() / max(right.numel(), 1) ** 0.5
        assert ((got.float() - right).abs() <= unit * right.abs() + noise + 1e-7).all()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small operands fill several blocks, the last one in part."""
    monkeypatch.setattr(wide_gemms, "BLOCK", 16)
    monkeypatch.setattr(fxprec.runtime.cpu.wide_gemms, "ELEMENTS", 512)


SIZES = st.integers(0, 40)


LONG = st.integers(0, 10_000)


@given(LONG, LONG, LONG)
def test_no_block_has_more_elements_than_a_square_one(m: int, k: int, n: int) -> None:
    rows, depth, columns = wide_gemms.tile(m, k, n)
    assert min(rows, depth, columns) >= 1
    assert max(rows * depth, depth * columns, rows * columns) <= wide_gemms.BLOCK**2


@settings(max_examples=60, deadline=None, suppress_health_check=[])
@given(m=SIZES, k=SIZES, n=SIZES, turned=st.tuples(st.booleans(), st.booleans()), dtype=st.sampled_from(DTYPES))
def test_matrices(m: int, k: int, n: int, turned: tuple[bool, bool], dtype: torch.dtype) -> None:
    a, b = (
        normal(y, x, dtype=dtype).t() if t else normal(x, y, dtype=dtype)
        for (x, y), t in zip(((m, k), (k, n)), turned, strict=True)
    )
    assert_right(aten.mm.default, a, b)
    assert_right(aten.addmm.default, normal(n, dtype=dtype), a, b, beta=0.5, alpha=2)


@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 7), (40, 33, 20), (100, 4, 3)])
def test_batches(m: int, k: int, n: int) -> None:
    assert_right(aten.bmm.default, normal(5, m, k), normal(5, k, n))
    assert_right(aten.baddbmm.default, normal(1, m, n), normal(5, m, k), normal(5, k, n), beta=2, alpha=0.5)
    assert_right(aten.mv.default, normal(m, k), normal(k))
    assert_right(aten.addmv.default, normal(m), normal(m, k), normal(k))
    assert_right(aten.dot.default, normal(k), normal(k))


def test_of_beta_0_a_bias_is_not_read() -> None:
    bias = torch.full((4,), torch.nan, dtype=torch.bfloat16)
    assert WIDE[aten.addmm.default](bias, normal(3, 5), normal(5, 4), beta=0).isfinite().all()


CONVOLUTIONS = {
    "plain": ((4, 6, 12, 12), (8, 6, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "strided": ((3, 6, 12, 12), (8, 6, 3, 3), ([2, 2], [0, 0], [1, 1], False, [0, 0], 1)),
    "depthwise": ((3, 6, 12, 12), (6, 1, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 6)),
    "transposed": ((3, 6, 6, 6), (6, 8, 2, 2), ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)),
    "1-d": ((3, 6, 30), (8, 6, 3), ([1], [1], [1], False, [0], 1)),
    "3-d": ((2, 4, 6, 6, 6), (4, 4, 3, 3, 3), ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)),
}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, last: bool) -> None:
    shape, weight_shape, options = CONVOLUTIONS[name]
    x, weight = normal(*shape), normal(*weight_shape)
    if last and x.dim() > 3:
        form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x, weight = x.to(memory_format=form), weight.to(memory_format=form)
    channels = weight.shape[1] * options[-1] if options[3] else weight.shape[0]
    assert_right(aten.convolution.default, x, weight, normal(channels), *options)
    out = WIDE[aten.convolution.default](x, weight, None, *options)
    for mask in ([True, True, True], [False, True, False], [True, False, False]):
        assert_right(
            aten.convolution_backward.default, torch.randn_like(out), x, weight, [channels] if mask[2] else None, *options, mask
        )  # fmt: skip


def test_a_weight_that_lends_its_shape_may_have_another_dtype() -> None:
    """The promised gradient has the dtype of the real one, else compiled code reads beyond its end."""
    weight, window = torch.randn(8, 6, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True])
    assert_right(aten.convolution_backward.default, normal(4, 8, 12, 12), normal(4, 6, 12, 12), weight, [8], *window)


def heads(batch: int, number: int, tokens: int, width: int) -> Tensor:
    return normal(batch, tokens, number, width).transpose(1, 2)


@pytest.mark.parametrize("mask", [None, (3, 1, 20, 20), (1, 2, 20, 20), (20, 20)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, mask: tuple[int, ...] | None) -> None:
    if causal and mask is not None:
        pytest.skip("a mask is causal itself")
    query, key, value = (heads(3, 2, 20, 8) for _ in range(3))
    more = {} if mask is None else {"attn_mask": normal(*mask)}
    assert_right(FORWARD, query, key, value, 0.0, causal, **more)
    out, logsumexp = WIDE[FORWARD](query, key, value, 0.0, causal, **more)
    assert logsumexp.dtype == torch.float32
    assert_right(BACKWARD, heads(3, 2, 20, 8), query, key, value, out, logsumexp, 0.0, causal, **more)


def peak(call: Any) -> int:
    from test_compiled_peak import allocated

    most, results = allocated(call)
    return most - results


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.mm.default, ((1024, 512), (512, 1024))),
        (aten.mm.default, ((2048, 256), (256, 1024))),
        (aten.mm.default, ((1024, 1024), (1024, 256))),
        (aten.mm.default, ((512, 2048), (2048, 512))),
        (aten.addmm.default, ((1024,), (1024, 512), (512, 1024))),
        (aten.bmm.default, ((32, 64, 64), (32, 64, 64))),
        (FORWARD, ((4, 8, 512, 32),) * 3),
    ],
    ids=lambda x: x._schema.name if hasattr(x, "_schema") else "",
)
@pytest.mark.cpu_dependent
def test_the_bytes_it_takes_are_known(operator: Any, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth, or above; and far less than whole copies in float32."""
    monkeypatch.setattr(wide_gemms, "BLOCK", BLOCK)
    monkeypatch.setattr(fxprec.runtime.cpu.wide_gemms, "ELEMENTS", wide_gemms.ELEMENTS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tensors = [normal(*shape) for shape in args]
        known = workspace(WIDE[operator]._schema.name, tensors, 1)
        taken = peak(lambda: WIDE[operator](*tensors))
    finally:
        torch.set_num_threads(threads)
    whole = 2 * sum(x.numel() * x.itemsize for x in tensors)
    assert 0.9 * taken <= known <= 2.5 * taken
    assert taken < whole or operator is aten.bmm.default


@pytest.mark.parametrize(("channels", "pixels", "size"), [(64, 32, 3), (256, 8, 3), (512, 4, 3), (64, 32, 1)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels last", "contiguous"])
@pytest.mark.cpu_dependent
def test_the_bytes_that_convolutions_take_are_known(
    channels: int,
    pixels: int,
    size: int,
    layout: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """No more is taken than known on a CPU with AVX2, which is the one that needs these kernels."""
    has_avx2 = Processor.here().vectors == "avx2"
    if layout is torch.contiguous_format and not has_avx2:
        pytest.skip("measured with AVX2 alone")
    monkeypatch.setattr(fxprec.runtime.cpu.wide_gemms, "ELEMENTS", wide_gemms.ELEMENTS)
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    shapes = [(32, channels, pixels, pixels)] * 2 + [(channels, channels, size, size)]
    gradient, x, weight = (normal(*shape).contiguous(memory_format=layout) for shape in shapes)
    window: Any = (None, [1, 1], [size // 2] * 2, [1, 1], False, [0, 0], 1)
    for operator, tensors, rest in (
        (aten.convolution.default, (x, weight), window),
        (aten.convolution_backward.default, (gradient, x, weight), (*window, [True, True, False])),
    ):
        known = workspace(WIDE[operator]._schema.name, tensors, 1)
        taken = peak(lambda: WIDE[operator](*tensors, *rest))  # noqa: B023
        assert (1 if has_avx2 else 0.9) * taken <= known <= 1.2 * taken, operator
